-- Grants and holds, and states in another order: what most checks do not meet.
--
-- Units that are granted, leased or owed are numbers of a limit's *extra*: units and end of the grant and
-- of both groups of holds, what is owed, and a 0. A lease is charged like any other units, and held
-- besides: a hold of a bucket keeps the units from being refilled, and a hold of a log keeps them in the
-- window. Those of window counters are kept for a reset. `algorithms/holds.py` explains the two groups.
--
-- A script makes its functions each time it runs, and each takes about 0.1 us. So these are in
-- extras.lua, which open.lua runs when there are any.

local arrange, complete, needed_with, live_holds, drained, level_with_holds, level_of, carried, carry

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
