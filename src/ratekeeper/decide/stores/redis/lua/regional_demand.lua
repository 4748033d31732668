-- The share of an eventual limit, which follows the demand of the regions.

-- Return the units of the last slot of time, rounded up.
local function sum_of_slots(number, current, before, slot)
    local new = max(floor(now / slot), number)
    if new > number + 1 then
        return 0
    end
    local left = min((new + 1) * slot - now, slot)
    local faded, rest = multiply_divide(left, new > number and current or before, slot)
    return faded + (rest > 0 and 1 or 0) + (new > number and 0 or current)
end

-- Return the share that an eventual limit uses now, as two numbers.
local function share_by_demand(demands, number, current, before)
    local others, p = 0, 1
    while p <= #demands do
        local at, demand, name
        at, demand, name, p = struct.unpack('>I7I6Bc0', demands, p)
        local left = DEMAND_US - (now - at)
        -- At a later time, the clock was set back.
        if left > 0 and left <= DEMAND_US and string.find(packed_shares, name, SHARES_BYTES + 1, true) then
            local faded, rest = multiply_divide(left, demand, DEMAND_US)
            others = others + faded + (rest > 0 and 1 or 0)
        end
    end
    if others == 0 then
        return 1, 1
    end
    local own = sum_of_slots(number, current, before, DEMAND_US)
    local part, rest = multiply_divide(PARTS, own, own + others)
    return max(part + (rest > 0 and 1 or 0), 1), PARTS
end
