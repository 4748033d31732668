-- Return two numbers for each limit: the millionths returned, and those accepted by all other regions.
local function returned_of(state)
    if state[RETURNED] ~= '' then
        return cmsgpack.unpack(state[RETURNED])
    end
    local found = {}
    for i = 1, 2 * (#state - LEDGERS) do
        found[i] = 0
    end
    return found
end

-- Return what other regions have reported, the place of one of them, and the length of each.
local function seen_of(state, name)
    local all = state[SEEN] ~= '' and cmsgpack.unpack(state[SEEN]) or {}
    local step = SEEN_STEP + 2 * (#state - LEDGERS)
    for p = 1, #all, step do
        if all[p] == name then
            return all, p - 1, step
        end
    end
    return all, nil, step
end

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
