-- How many states a subject's hash holds: KEYS[1]. It only reads, and stands alone: state.lua, which
-- explains the layout, is about one rule, and this about all of them.
--
-- A field that begins with \1 is a chunk of a log, and one with \2 the rest of a rule's states. There
-- may be many chunks, and long ones: only their names are looked at.

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
