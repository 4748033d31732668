-- Count the states in a subject's hash, KEYS[1]. It only reads, and does not use state.lua, which
-- explains the layout: that reads one rule, and this all rules.
--
-- A field that begins with \1 is a chunk of a log, and one with \2 continues a rule's states. There
-- may be many long chunks, so only their names are read.

local PIECE_BYTES = 64
local states = 0
for _, field in ipairs(redis.call('HKEYS', KEYS[1])) do
    local first = string.byte(field)
    if first ~= 1 and first ~= 2 then
        local raw, pieces = redis.call('HGET', KEYS[1], field), 1
        while #raw == pieces * PIECE_BYTES do
            local more = redis.call('HGET', KEYS[1], '\2' .. pieces .. ':' .. field)
            if not more then
                break
            end
            raw, pieces = raw .. more, pieces + 1
        end
        local held, counted, p = cmsgpack.unpack(raw), {}, 3
        while held[p] do
            local id = held[p] -- negative: granted on top of the same limit
            if not counted[math.abs(id)] then
                counted[math.abs(id)] = true
                states = states + 1
            end
            p = p + ((id < 0 or id % 2 == 1) and 4 or 3)
        end
    end
end
return states
