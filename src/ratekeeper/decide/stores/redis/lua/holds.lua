-- Where the limits' states are in `held`; and the units that are leased.
--
-- A lease is charged like any other units, and held besides: a hold of a bucket keeps the units from
-- being refilled, and a hold of a log keeps them in the window. Those of window counters are kept for
-- a reset. `algorithms/holds.py` explains the two groups. The functions are made only if there are
-- holds, or if units are leased or given back.

local HOLD = 8589934592 -- 2^33
local LEASE_MAX, LEASE_PART = 2000000, 10

-- Usually the states are in the order of the gate, and there are no others.
local in_place, granted, holding = raw, false, false
local next_p = HELD_FIRST
if raw then
    for g = GATE_FIRST + ID, #gate, GATE_STEP do
        in_place = in_place and held[next_p] == gate[g]
        next_p = next_p + (gate[g] % 2 == 1 and 4 or 3)
    end
    in_place = in_place and not held[next_p]
    next_p = HELD_FIRST
    if not in_place then
        local p = HELD_FIRST
        while held[p] do
            granted = granted or (held[p] < 0 and held[p] > -HOLD)
            holding = holding or held[p] <= -HOLD
            p = p + ((held[p] < 0 or held[p] % 2 == 1) and 4 or 3)
        end
    end
end

local dropped -- places of grants and holds that have ended
local holds_of, put_holds, live_holds, ended_holds, add_hold, held_until, level_with_holds
if holding or ARGV[6] then
    -- Return the units and the end of both groups; 0 where there is none.
    holds_of = function(id)
        local p, q = place(-id - HOLD), place(-id - 2 * HOLD)
        local u1, t1 = p and held[p + 2] or 0, p and held[p + 3] or 0
        local u2, t2 = q and held[q + 2] or 0, q and held[q + 3] or 0
        if u1 == 0 then
            return u2, t2, 0, 0
        end
        return u1, t1, u2, t2
    end

    put_holds = function(id, ...)
        local numbers = {...}
        for group = 1, 2 do
            local units, name = numbers[2 * group - 1], -id - group * HOLD
            local p = place(name) or units > 0 and #held + 1
            if p then
                held[p], held[p + 1], held[p + 2], held[p + 3] = name, 0, units, numbers[2 * group]
                dropped = dropped or {}
                dropped[p] = units == 0 or nil
            end
        end
    end

    -- Drop the holds that have ended.
    live_holds = function(id, at)
        local u1, t1, u2, t2 = holds_of(id)
        if t1 <= at then
            u1, t1, u2, t2 = u2, t2, 0, 0
        end
        if t1 <= at then
            u1, t1 = 0, 0
        end
        put_holds(id, u1, t1, u2, t2)
        return u1, t1, u2, t2
    end

    -- Return the holds that ended by `at` and after `oldest`: {time, units} each.
    ended_holds = function(id, at, oldest)
        local found, numbers = {}, {holds_of(id)}
        for i = 1, 3, 2 do
            local units, ends = numbers[i], numbers[i + 1]
            if units > 0 and ends > oldest and ends <= at then
                found[#found + 1] = {ends, units}
            end
        end
        return found
    end

    add_hold = function(id, units, ends)
        local u1, t1, u2, t2 = live_holds(id, now)
        if u1 == 0 or ends <= t1 then
            put_holds(id, u1 + units, max(t1, ends), u2, t2)
        else
            put_holds(id, u1, t1, u2 + units, max(t2, ends))
        end
    end

    -- Return until when the units of a lease are held, and until when they can be given back.
    held_until = function(g, ends)
        local kind, window = gate[g + KIND], gate[g + WINDOW]
        local whole = kind == BUCKET and gate[g + FULL] or window
        local until_back = ends + min(LEASE_MAX, floor(whole / LEASE_PART))
        if kind == BUCKET then
            return until_back, until_back
        elseif kind == LOG then
            return ends, ends + LEASE_MAX
        end
        return min(until_back, ends - 1 - fmod(ends - 1, window) + window), until_back
    end

    -- Return the level of a bucket: its own, or that of a hold if it is higher. That of a late charge
    -- may be above the capacity: see check.lua.
    level_with_holds = function(g, a, late)
        local u1, t1, u2, t2 = holds_of(gate[g + ID])
        for group = 1, 2 do
            local units, full = group == 1 and u1 + u2 or u2, gate[g + FULL]
            local level = (late and units or min(units, gate[g + CAPACITY])) * MICROS_PER_UNIT
            if late then
                full = 2 * level / gate[g + NUMERATOR] * gate[g + DENOMINATOR]
            end
            local elapsed = now - (group == 1 and t1 or t2)
            if elapsed > 0 then
                elapsed = elapsed - fmod(elapsed, gate[g + STEP])
                level = elapsed < full
                    and level - multiply_divide(elapsed, gate[g + NUMERATOR], gate[g + DENOMINATOR])
                    or 0
            end
            a = max(a, level)
        end
        return a
    end
end
