-- Units that are leased, as numbers of a limit's extra: units and end of each group.
--
-- A lease is charged like any other units, and held besides: a hold of a bucket keeps the units from
-- being refilled, and a hold of a log keeps them in the window. Those of window counters are kept for
-- a reset. `algorithms/holds.py` explains the two groups.

-- Put the group that ends first in front, and drop the holds that have ended.
local function live_holds(extra, at)
    if extra[3] == 0 or extra[4] <= at then
        extra[3], extra[4], extra[5], extra[6] = extra[5], extra[6], 0, 0
        if extra[4] <= at then
            extra[3], extra[4] = 0, 0
        end
    end
end

-- Return the level of the higher hold of a bucket. That of a late charge may be above the capacity:
-- a higher limit may have admitted more.
local function level_with_holds(gate, g, extra, at, late)
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

--@ if leases
local LEASE_MIN, LEASE_MAX, LEASE_PART = 20000, 2000000, 10

local function add_hold(extra, units, ends)
    live_holds(extra, now)
    local group = (extra[3] == 0 or ends <= extra[4]) and 3 or 5
    extra[group], extra[group + 1] = extra[group] + units, max(extra[group + 1], ends)
end

-- Return until when the units of a lease are held, and until when they can be given back.
local function held_until(gate, g, ends)
    local kind, window = gate[g + KIND], gate[g + WINDOW]
    local whole = kind == BUCKET and gate[g + FULL] or window
    local until_back = ends + min(LEASE_MAX, floor(whole / LEASE_PART))
    if kind == BUCKET then
        return until_back, until_back
    elseif kind == LOG then
        return ends, ends + LEASE_MAX
    end
    return min(until_back, ends - 1 - (ends - 1) % window + window), until_back
end
--@ end
