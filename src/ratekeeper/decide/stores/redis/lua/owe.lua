-- Charge units in full under all limits of a gate, whether or not there is room for them.
--
-- KEYS  see open.lua
-- ARGV  the gate and the units; perhaps the time in microseconds, instead of the server's
--
-- A live grant pays the units that do not fit a limit. What it does not pay is owed: see debt.py and the
-- algorithms' owe. The reply is an array of one number: the most units of a limit that its bound forgave.

--@ extras
local gate, wanted, forgiven = {cmsgpack.unpack(ARGV[1])}, tonumber(ARGV[2]), 0
local last_g, strict, key, held, logs, extras = #gate, true, nil, nil, nil, nil
--@ open
local need, p = now, HELD_FIRST
extras = extras or {}

-- Return the units that the limit is to be charged, after its grant has paid what has no room.
local function unpaid(extra, room)
    local live = now < extra[2] and extra[1] or 0
    local paid = min(max(wanted - max(room, 0), 0), live)
    extra[1] = live - paid
    return wanted - paid
end

-- Keep a debt up to its bound; note what exceeds it, in units.
local function owe(extra, debt, bound, unit)
    extra[OWED] = min(debt, bound)
    forgiven = max(forgiven, ceil((debt - extra[OWED]) / unit))
end

for g = GATE_FIRST, last_g, GATE_STEP do
    local kind, capacity, window = gate[g + KIND], gate[g + CAPACITY], gate[g + WINDOW]
    local extra = extras[g] or {0, 0, 0, 0, 0, 0, 0, 0}
    local units, last, a, at, b
    extras[g] = extra
    live_holds(extra, 0)
--@ if logs
    local ring = logs and logs[g]
    if ring then
        at = max(now, ring.last)
        ring.oldest = at - window
        extend(ring, extra, at)
        local live = (extra[4] > at and extra[3] or 0) + (extra[6] > at and extra[5] or 0)
        local room = ring.owed > 0 and 0 or capacity - ring.due + ring.gone - live
        units = unpaid(extra, room)
        if units > 0 then
            enter(ring, extra, at)
            room = max(capacity - size_of(ring) - live, 0)
            local debt = extra[OWED] + units
            local entering = min(room, debt)
            owe(extra, debt - entering, max(ring.bound + min(units, room) - entering, 0), 1)
            append(ring, at, entering)
        end
        ring.extra = extra
        ring.need = needed_with(extra, at + window * (1 + ceil(extra[OWED] / capacity)), window)
    end
--@ end
    if kind ~= LOG then
        last, a = held[1] - held[p + 1], held[p + 2]
        at = max(now, last)
        local room, owed = 0, extra[OWED]
        if kind == BUCKET then
            a, at = level_of(gate, g, last, a, extra)
            room = floor((capacity * MICROS_PER_UNIT - a) / MICROS_PER_UNIT)
        elseif kind == FIXED then
            if owed > 0 then
                a, b, owed = carry(gate, g, last, a, nil, owed, at)
            elseif last - last % window ~= at - at % window then
                a = 0
            end
            room = capacity - a
        else
            b = held[p + 3]
            local windows = (at - at % window - last + last % window) / window
            if owed > 0 then
                a, b, owed = carry(gate, g, last, a, b, owed, at)
            elseif windows > 0 then
                a, b = windows == 1 and b or 0, 0
            end
            local faded, rest = multiply_divide(window - at % window, a, window)
            room = capacity - b - faded - (rest > 0 and 1 or 0)
        end
        units = unpaid(extra, room)
        if units > 0 then
            if kind == BUCKET then
                local full = capacity * MICROS_PER_UNIT
                local level = a + units * MICROS_PER_UNIT
                a = min(level, full)
                owe(extra, level - a, gate[g + DEBT] * MICROS_PER_UNIT, MICROS_PER_UNIT)
            elseif kind == FIXED then
                a, owed = carried(capacity, a, owed + units, 0)
                owe(extra, owed, gate[g + DEBT], 1)
            else
                b, owed = carried(capacity, b, owed + units, 0)
                owe(extra, owed, gate[g + DEBT], 1)
                held[p + 3] = b
            end
            held[p + 1], held[p + 2] = held[1] - at, a
            live_holds(extra, max(now, last))
        end
        --@ needed
        need = max(need, until_then)
        p = p + (kind == COUNTER and 4 or 3)
    end
end
if key then
    write(key, gate[1], complete(gate, held, extras), need)
end
--@ if logs
for _, ring in pairs(logs or {}) do
    save(ring)
end
--@ end
return {forgiven}
