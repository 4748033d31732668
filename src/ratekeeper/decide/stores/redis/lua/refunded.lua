-- Return the two counts of a window counter as of `at`.
local function rolled(window, last, previous, current, at)
    local windows = (at - at % window - last + last % window) / window
    if windows <= 0 then
        return previous, current
    end
    return windows == 1 and current or 0, 0
end

-- Return a state after a refund: last, a, b; or nothing, if no state is left.
local function refunded(gate, g, last, a, b, extra, units, charged)
    local kind, window, owed = gate[g + KIND], gate[g + WINDOW], extra[OWED]
    if kind == BUCKET then
        local capacity = gate[g + CAPACITY]
        owed = min(owed, gate[g + DEBT] * MICROS_PER_UNIT)
        local micros = (owed > 0 and units or min(units, capacity)) * MICROS_PER_UNIT
        -- Rounded up to whole steps.
        local elapsed = charged and ceil((last - charged) / gate[g + STEP]) * gate[g + STEP] or 0
        if elapsed >= 2 * micros / gate[g + NUMERATOR] * gate[g + DENOMINATOR] then
            micros = 0
        elseif elapsed > 0 then
            -- Rounded down, as in each refill that the bucket has made since.
            micros = micros - multiply_divide(elapsed, gate[g + NUMERATOR], gate[g + DENOMINATOR])
        end
        -- A correction gives room, also if the capacity was lowered. Otherwise units above the capacity
        -- stay used: the limit may be the lower one of the charge.
        local used = (charged and a or min(a, capacity * MICROS_PER_UNIT)) - max(micros - owed, 0)
        if micros <= 0 then
            return last, a
        end
        extra[OWED] = max(owed - micros, 0)
        if used > 0 then
            return last, used
        end
    elseif kind == FIXED then
        local at, count = last, a
        if owed > 0 then
            at = charged and last or max(last, now)
            count, b, owed = carry(gate, g, last, a, nil, owed, at)
        end
        charged = charged or max(last, now)
        if charged - charged % window ~= at - at % window then
            return last, a
        end
        count = count - max(units - owed, 0)
        extra[OWED] = max(owed - units, 0)
        if count > 0 then
            return at, count
        end
    else
        local at = max(now, last)
        local ago = charged and (at - at % window - charged + charged % window) / window or 0
        if ago < 0 or ago > 1 then
            return last, a, b
        elseif owed > 0 then
            a, b, owed = carry(gate, g, last, a, b, owed, at)
        else
            a, b = rolled(window, last, a, b, at)
        end
        extra[OWED] = owed
        if ago == 0 then
            b = max(b - max(units - owed, 0), 0)
            extra[OWED] = max(owed - units, 0)
        else
            a = max(a - units, 0)
        end
        if a > 0 or b > 0 then
            return at, a, b
        end
    end
end
