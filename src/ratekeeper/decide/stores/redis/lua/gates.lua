-- The states that a gate names.
--
-- KEYS are, for each gate in the order of the arguments: the bucket, if the rule has other limits than
-- logs; and the key of each log.

local fields, next_key = nil, 1

-- Return until when a state is needed, also if the limit is slower than the one that wrote it.
local function needed(gate, g, held, p, extra)
    local kind, window, at, need = gate[g + KIND], gate[g + WINDOW], held[1] - held[p + 1], nil
    if kind == BUCKET then
        -- One step more: the bucket is full at the end of a step.
        need = at + held[p + 2] / gate[g + NUMERATOR] * gate[g + DENOMINATOR] + gate[g + STEP] - 1
    else
        need = at - at % window + (kind == FIXED and window or 2 * window)
    end
    if extra then
        return needed_with(extra, need, kind == BUCKET and gate[g + FULL] + gate[g + STEP] or 2 * window)
    end
    return need
end

-- Return the states of a gate, which has the limits up to `last`: the bucket, the array of the field
-- with the states of the gate first, the logs, and the extras; each of them nil if there is none.
-- `fields` and `rings` are those that the gates before in a group have charged.
local function opened(gate, last, strict)
    local key, held, logs, extras = KEYS[next_key], nil, nil, nil
--@ if logs
    local counts = false
    for g = GATE_FIRST, last, GATE_STEP do
        counts = counts or gate[g + KIND] ~= LOG
    end
    key, next_key = counts and key or nil, next_key - (counts and 0 or 1)
    for g = GATE_FIRST, last, GATE_STEP do
        if gate[g + KIND] == LOG then
            logs, next_key = logs or {}, next_key + 1
            logs[g] = KEYS[next_key]
        end
    end
--@ end
    next_key = next_key + 1 -- before anything that may fail
--@ if logs
    for g, name in pairs(logs or {}) do
        logs[g] = ring_of(name)
        logs[g].capacity, logs[g].window = gate[g + CAPACITY], gate[g + WINDOW]
        if logs[g].extra then
            if not arrange then
                meet_extras()
            end
            extras = extras or {}
            extras[g] = logs[g].extra
        end
    end
    if not key then
        return key, held, logs, extras
    end
--@ end
    held = fields and fields[gate[1]] or read(key, gate[1])
    -- Usually the states are in the order of the gate, and there are no others.
    local usual, p = held, HELD_FIRST
    for g = GATE_FIRST + ID, last, GATE_STEP do
        local id = gate[g]
        if id % 4 ~= 3 then
            usual = usual and held[p] == id
            p = p + (id % 2 == 1 and 4 or 3)
        end
    end
    if not usual or held[p] then
        if not arrange then
            meet_extras()
        end
        extras = extras or {}
        held = arrange(gate, last, held, extras, strict)
        extras = next(extras) and extras
    end
    return key, held, logs, extras
end
