-- Count the states in KEYS[1]: a bucket, a log, requests in flight, or a key of global limits. It only reads, and does not
-- use state.lua, which explains the fields: that reads one rule of one subject, and this all of them.
--
-- A key that ends in {%...}, without another % or }, is a bucket. A field that continues another has
-- more than 8 bytes. Of a long bucket, the first 1,000 fields are read.

local PIECE_BYTES, FIELDS_MAX = 64, 1000
local key = KEYS[1]
local name = string.match(key, '^[^{]*:{%%r%d?%d?}:(.+)')
if name then
    -- In the state of a global rule, the gate has two numbers and six for each limit; see regional.lua. The
    -- other keys have no states.
    local raw = string.match(name, '^' .. string.rep('%x', 16) .. ':') and redis.call('GET', key) or ''
    local done, gate = pcall(struct.unpack, '>I2c0', raw, 15)
    local numbers = done and {pcall(cmsgpack.unpack, gate)} or {}
    return numbers[1] and math.max(math.floor((#numbers - 3) / 6), 0) or 0
end
if not string.find(key, '^[^{]*:{%%[^%%}]+}$') then
    local own = '^[^{]*:{%%[^%%}]+}'
    return (string.find(key, own .. 'log:') or string.find(key, own .. 'slots:')) and 1 or 0
end
local fields, states, read = redis.call('HKEYS', key), 0, 0
for _, field in ipairs(fields) do
    read = read + 1
    if read > FIELDS_MAX then
        return math.floor(states * #fields / FIELDS_MAX)
    end
    if #field == 8 then
        local raw, pieces = redis.call('HGET', key, field), 1
        while #raw == pieces * PIECE_BYTES do
            local more = redis.call('HGET', key, '\2' .. pieces .. ':' .. field)
            if not more then
                break
            end
            raw, pieces = raw .. more, pieces + 1
        end
        local held, counted, p = {cmsgpack.unpack_limit(raw, 1000, 11)}, {}, 2
        while held[p] do
            local id = held[p] -- negative: granted on top of the same limit, or leased of it
            local limit = math.abs(id) % 8589934592
            if not counted[limit] then
                counted[limit] = true
                states = states + 1
            end
            p = p + ((id < 0 or id % 2 == 1) and 4 or 3)
        end
    end
end
return states
