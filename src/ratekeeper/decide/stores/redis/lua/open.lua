-- Open the states that a gate names; this is included where a gate is known, because a function takes
-- 0.3 us more.
--
-- It needs `gate`, which has the limits up to `last_g`, and `strict`: the field must have room for new
-- states. It sets `key`, the bucket; `held`, the array of the field with the states of the gate first;
-- `logs` and `extras`, by the places of the limits. Each of them is nil if there is none.
--
-- KEYS are, for each gate in the order of the arguments: the bucket, if the rule has other limits than
-- logs; and the key of each log. `fields` and `rings` are those that earlier gates of a group have
-- charged.

key = KEYS[next_key]
--@ if logs
local counts = false
for g = GATE_FIRST, last_g, GATE_STEP do
    counts = counts or gate[g + KIND] < LOG
end
key, next_key = counts and key or nil, next_key - (counts and 0 or 1)
for g = GATE_FIRST, last_g, GATE_STEP do
    if gate[g + KIND] >= LOG then
        logs, next_key = logs or {}, next_key + 1
        logs[g] = KEYS[next_key]
    end
end
--@ end
next_key = next_key + 1 -- before anything that may fail
--@ if logs
for g, name in pairs(logs or {}) do
--@ if slots
    logs[g] = gate[g + KIND] == FLIGHT and slots_of(name) or name
--@ end
    logs[g] = type(logs[g]) == 'table' and logs[g] or ring_of(name)
    logs[g].capacity, logs[g].window, logs[g].bound = gate[g + CAPACITY], gate[g + WINDOW], gate[g + DEBT]
    if logs[g].extra then
        extras = extras or {}
        extras[g] = logs[g].extra
    end
end
--@ end
held = key and fields and fields[gate[1]]
if key and not held then
    local raw, pieces = call('HGET', key, gate[1]), 1
    while raw and #raw == pieces * PIECE_BYTES do
        local more = call('HGET', key, '\2' .. pieces .. ':' .. gate[1])
        if not more then
            break
        end
        raw, pieces = raw .. more, pieces + 1
    end
    if raw then
        held = {0, 0, cmsgpack.unpack_limit(raw, 1000, 11)}
        local base, ends = struct.unpack('>I7I4', raw)
        if base >= 4503599627370496 then -- 2^52
            error('LAYOUT')
        end
        -- Time never rewinds for a state. Lags count from the time of the last write of any state.
        held[1], held[2], held[3] = base > now and base or now, ends, pieces
        local shift, p, id = held[1] - base, HELD_FIRST, held[HELD_FIRST]
        while id do
            held[p + 1] = held[p + 1] + shift
            p = p + ((id < 0 or id % 2 == 1) and 4 or 3)
            id = held[p]
        end
    end
end
local unusual = false
if key then
    -- Usually the states are in the order of the gate, and there are no others.
    local usual, p = held, HELD_FIRST
    for g = GATE_FIRST + ID, last_g, GATE_STEP do
        local id = gate[g]
        if id % 4 ~= 3 then
            usual = usual and held[p] == id
            p = p + (id % 2 == 1 and 4 or 3)
        end
    end
    unusual = not usual or held[p]
end
local meets = unusual or extras
--@ if leases
meets = true
--@ end
--@ if meets
meets = true
--@ end
if meets and not arrange then
    --@ extras
end
if unusual then
    extras = extras or {}
    held = arrange(gate, last_g, held, extras, strict)
    extras = next(extras) and extras
end
