-- Return how many of the millionths that counted at a time certainly count now.
local function certainly_left(gate, g, micros, since)
    local window = gate[g + WINDOW]
    if micros == 0 then
        return 0
    elseif gate[g] > LEAKY then
        return floor(since / window) == floor(now / window) and micros or 0
    end
    local elapsed = math.ceil(max(now - since, 0) / gate[g + STEP]) * gate[g + STEP]
    if elapsed / gate[g + DENOMINATOR] * gate[g + NUMERATOR] > 2 * micros then
        return 0
    end
    local drained, rest = multiply_divide(elapsed, gate[g + NUMERATOR], gate[g + DENOMINATOR])
    return max(micros - drained - (rest > 0 and 1 or 0), 0)
end
