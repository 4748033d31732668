-- Make the functions of holds.lua: a gate has extras, or its states are in another order.

-- Return how many numbers a state has.
local function width_of(id)
    return (id < 0 or id % 2 == 1) and 4 or 3
end

-- Return the array with the states of a gate first, in its order. An absent state has -1 as its last
-- time. Of each limit that has units granted, leased or owed, `extras` gets its extra. If the gate is
-- to be charged, the field must have room.
arrange = function(gate, last, held, extras, strict)
    local places, arranged, p = {}, held and {held[1], held[2], held[3]} or {now, 0, 0}, HELD_FIRST
    while held and held[p] do
        places[held[p]] = p
        p = p + width_of(held[p])
    end
    local function take(id, width)
        local q = places[id]
        places[id] = nil
        for number = 0, q and width - 1 or -1 do
            arranged[#arranged + 1] = held[q + number]
        end
        return q
    end
    for g = GATE_FIRST, last, GATE_STEP do
        local id, kind = gate[g + ID], gate[g + KIND]
        if kind < LOG and not take(id, kind == COUNTER and 4 or 3) then
            if strict and held and held[NUMBERS_MAX] then
                error('CROWDED')
            end
            local size = #arranged
            arranged[size + 1], arranged[size + 2], arranged[size + 3] = id, arranged[1] + 1, 0
            arranged[size + 4] = kind == COUNTER and 0 or nil
        end
        for group = 0, kind < LOG and 3 or -1 do
            local q = take(-id - group * HOLD, 0)
            if q then
                extras[g] = extras[g] or {0, 0, 0, 0, 0, 0, 0, 0}
                extras[g][2 * group + 1], extras[g][2 * group + 2] = held[q + 2], held[q + 3]
            end
        end
    end
    p = HELD_FIRST
    while held and held[p] do
        local id = held[p]
        local width = width_of(id)
        if places[id] then
            take(id, width)
        end
        p = p + width
    end
    return arranged
end

-- Return the array of a field to write: without the states that are absent, and with the extras.
complete = function(gate, held, extras)
    local whole, p = {held[1], held[2], held[3]}, HELD_FIRST
    while held[p] do
        local finish = p + width_of(held[p])
        for q = p, held[p + 1] <= held[1] and finish - 1 or 0 do
            whole[#whole + 1] = held[q]
        end
        p = finish
    end
    for g, extra in pairs(extras) do
        for group = 0, gate[g + KIND] < LOG and 3 or -1 do
            if extra[2 * group + 1] > 0 then
                local size = #whole
                whole[size + 1], whole[size + 2] = -gate[g + ID] - group * HOLD, 0
                whole[size + 3], whole[size + 4] = extra[2 * group + 1], extra[2 * group + 2]
            end
        end
    end
    return whole
end

-- Return until when a state with its extra is needed. What is held needs `whole` more.
needed_with = function(extra, need, whole)
    return max(need, extra[1] > 0 and extra[2] or 0, extra[3] > 0 and max(extra[4], extra[6]) + whole or 0)
end

-- Put the group that ends first in front, and drop the holds that have ended.
live_holds = function(extra, at)
    if extra[3] == 0 or extra[4] <= at then
        extra[3], extra[4], extra[5], extra[6] = extra[5], extra[6], 0, 0
        if extra[4] <= at then
            extra[3], extra[4] = 0, 0
        end
    end
end

-- Return the level of a bucket at a time, and the end of its last step. The refill is rounded down: a
-- part of a millionth that is not refilled yet cannot be spent. After `full` it is 0.
drained = function(gate, g, last, level, full, at)
    local elapsed = at - last
    if elapsed <= 0 then
        return level, last
    end
    elapsed = elapsed - elapsed % gate[g + STEP]
    if elapsed < full then
        return level - multiply_divide(elapsed, gate[g + NUMERATOR], gate[g + DENOMINATOR]), last + elapsed
    end
    return 0, last + elapsed
end

-- Return the level of the higher hold of a bucket. That of a late charge may be above the capacity:
-- a higher limit may have admitted more.
level_with_holds = function(gate, g, extra, at, late)
    local highest = 0
    for group = 3, 5, 2 do
        local units, full = group == 3 and extra[3] + extra[5] or extra[5], gate[g + FULL]
        local level = (late and units or min(units, gate[g + CAPACITY])) * MICROS_PER_UNIT
        if late then
            full = 2 * level / gate[g + NUMERATOR] * gate[g + DENOMINATOR]
        end
        highest = max(highest, (drained(gate, g, extra[group + 1], level, full, at)))
    end
    return highest
end

-- Return the level of a bucket with its debt and its holds, which is at least 0, and the end of its
-- last step.
level_of = function(gate, g, last, a, extra)
    local full = MICROS_PER_UNIT * gate[g + CAPACITY]
    a = min(a, full) + min(extra[OWED], gate[g + DEBT] * MICROS_PER_UNIT)
    local level, at = drained(gate, g, last, a, 2 * a / gate[g + NUMERATOR] * gate[g + DENOMINATOR], now)
    level = max(level, level_with_holds(gate, g, extra, now), 0)
    return level, level > 0 and at or max(last, now)
end

-- Return the count of a window and the debt beyond it, so many windows later: see debt.py.
carried = function(limit, count, debt, windows)
    local charged = min(debt, max(limit - count, 0))
    count, debt = count + charged, debt - charged
    if windows > 0 then
        debt = max(debt - (windows - 1) * limit, 0)
        count = min(debt, limit)
        debt = debt - count
    end
    return count, debt
end

-- Return the counts of a window that owes, and its debt, as of `at`.
carry = function(gate, g, last, a, b, debt, at)
    local limit, window = gate[g + CAPACITY], gate[g + WINDOW]
    local windows = (at - at % window - last + last % window) / window
    debt = min(debt, gate[g + DEBT])
    if not b then
        a, debt = carried(limit, a, debt, windows)
    elseif windows > 0 then
        a, debt = carried(limit, b, debt, windows - 1)
        b, debt = carried(limit, a, debt, 1)
    else
        b, debt = carried(limit, b, debt, 0)
    end
    return a, b, debt
end
