-- Decide one request by all limits of a rule: every limit has room, or none is charged.
--
-- ARGV[2]  the cost in units
-- ARGV[3]  the time in microseconds; absent or empty: the server's
-- ARGV[4]  'look': decide, but spend nothing
-- ARGV[5]  the units to lease with the check; ARGV[6]: twice the nodes; ARGV[7]: the microseconds that
--          the lease lasts. Or 'late', and ARGV[6] the age of units that were admitted already.
--
-- The script decides whether to allow the request, and charges it. The client computes the other
-- fields of a decision (remaining units, time to retry) from the states before the check, with the
-- code that is the reference for every engine. So the reply is a flat array:
--
--     the time, or -1 - the time when denied; then for each limit
--     bucket, fixed   last, a                     last is -1 if there is no state
--     counter         last, a, b
--     log             last, number of live times, the time that must expire for the cost to fit
--
-- If any units are granted, each limit has two more numbers (units, end), and a log returns all its
-- live times instead of the one. If any units are leased, each limit has four more: the units and the
-- end of both groups of holds; they count as live times of a log. With a lease, its units and its end
-- are last, and for each log the time that must expire for the same cost to fit once more; 0 if it
-- fits, or if units are granted.
--
-- The loop puts each limit's state after the request into `held`. If one limit denies, `held` is not
-- written, so nothing changes. The usual path calls neither `max` nor `min`, which take 0.05 us.

local cost = tonumber(ARGV[2])
local limits = (#gate - GATE_FIRST + 1) / GATE_STEP

-- `wanted` are the units to lease. `late` is the age of a late charge, which counts at its own time
-- and is not refused.
local wanted, lease_room, lease_ends, late, late_charge
local real_now = now
if ARGV[5] == 'late' then
    late, granted = tonumber(ARGV[6]), false
    now = max(now - late, 0)

    -- Return a state's amounts after the charge, and 0 if it does not count any more.
    late_charge = function(g, at, a, b)
        local kind, capacity, window = gate[g + KIND], gate[g + CAPACITY], gate[g + WINDOW]
        local ago = at - fmod(at, window) - now + fmod(now, window)
        if kind == BUCKET then
            return max(a, min(a + cost * MICROS_PER_UNIT, capacity * MICROS_PER_UNIT)), b, cost
        elseif kind == FIXED then
            if ago ~= 0 or real_now - fmod(real_now, window) ~= now - fmod(now, window) then
                return a, b, 0
            end
            return max(a, min(a + cost, capacity)), b, cost
        elseif ago > window then
            return a, b, 0
        elseif ago == window then
            return max(a, min(a + cost, capacity)), b, cost
        end
        return a, max(b, min(b + cost, capacity)), cost
    end
elseif ARGV[5] then
    wanted = tonumber(ARGV[5])
    lease_room, lease_ends = wanted, now + tonumber(ARGV[7])
end

local answer, size, passes = {now}, 1, true
-- After a late charge, states are kept for two seconds, also if they are whole before: the next late
-- charge may be of a time at which they were not (see leasing.py).
local need_us = late and late + 2000000 or 0
local logs_us = need_us -- of logs that are in another hash
local appends -- writes to logs
local earlier = wanted and {} -- start, live times, all units that count; of each log

for i = 0, limits - 1 do
    local g = GATE_FIRST + i * GATE_STEP
    local kind, id, capacity = gate[g + KIND], gate[g + ID], gate[g + CAPACITY]
    local p
    if in_place then
        p, next_p = next_p, next_p + (id % 2 == 1 and 4 or 3)
    elseif raw then
        p = place(id)
    end
    local last, a, b, room, log, kept, dead = -1, 0, 0, capacity, nil, 0, 0
    local wide = id % 2 == 1
    if p then
        last, a, b = held[1] - held[p + 1], held[p + 2], wide and held[p + 3] or 0
    end
    local at = last > now and last or now
    answer[size + 1], answer[size + 2] = last, a
    size = size + 2
    if kind == BUCKET then
        if p then
            -- The refill is rounded down: a part of a millionth that is not refilled yet cannot be
            -- spent. A full bucket is as new: its next step counts from now.
            local full = gate[g + FULL]
            if late then -- a higher limit may have admitted more than the capacity
                full = 2 * a / gate[g + NUMERATOR] * gate[g + DENOMINATOR]
            elseif a > capacity * MICROS_PER_UNIT then
                a = capacity * MICROS_PER_UNIT
            end
            at = last
            local elapsed, stepped = now - last, last
            if elapsed > 0 then
                if gate[g + STEP] > 1 then
                    elapsed = elapsed - fmod(elapsed, gate[g + STEP])
                end
                stepped = last + elapsed
                if elapsed < full then
                    a = a - multiply_divide(elapsed, gate[g + NUMERATOR], gate[g + DENOMINATOR])
                    at = last + elapsed
                else
                    a = 0
                end
                if a <= 0 then
                    a, at = 0, now
                end
            end
            if holding then
                local level = level_with_holds(g, a, late)
                if level > a then
                    a, at = level, stepped
                end
            end
            room = floor((capacity * MICROS_PER_UNIT - a) / MICROS_PER_UNIT)
        end
    elseif kind == FIXED then
        local window = gate[g + WINDOW]
        if last - fmod(last, window) ~= at - fmod(at, window) then
            a = 0
        end
        room = capacity - a
    elseif kind == COUNTER then
        size = size + 1
        answer[size] = b
        if p or late then
            local window = gate[g + WINDOW]
            at, a, b = rolled(window, last, a, b, real_now)
            -- Rounded up: a request of the previous window counts until it has faded out entirely.
            local faded, rest = multiply_divide(window - fmod(at, window), a, window)
            room = capacity - b - faded - (rest > 0 and 1 or 0)
        end
    else
        log = log_of(g)
        b = p and b or gate[g + FULL] -- for a new log, the times per chunk
        local per_chunk, alive, blocking = fmod(b, 1024), 0, granted and '' or 0
        if wanted then
            earlier[g] = {0, 0, 0, log = log}
        end
        if p then
            kept = (b - per_chunk) / 1024
            if kept == 0 then -- it has holds only
                last, at, answer[size - 1] = -1, now, -1
            end
            alive, dead = log.split(at - gate[g + WINDOW], last, a, kept, per_chunk)
            local u1, t1, u2, t2 = 0, 0, 0, 0
            if holding then -- as if they were times after all others
                u1, t1, u2, t2 = holds_of(id)
                u1 = t1 > at - gate[g + WINDOW] and u1 or 0
                u2 = t2 > at - gate[g + WINDOW] and u2 or 0
            end
            local all = alive + u1 + u2
            room = capacity - all
            if granted then
                blocking = log.times(a + dead, alive, per_chunk)
            elseif cost > room and cost <= capacity then
                local number = all - capacity + cost - 1
                if number < alive then
                    blocking = log.time_at(per_chunk, a + dead + number)
                else
                    blocking = number < alive + u1 and t1 or t2
                end
            end
            if wanted then
                earlier[g] = {a + dead, alive, all, log = log}
            end
            alive = granted and alive or all
        end
        answer[size], answer[size + 1] = alive, blocking
        size = size + 1
    end
    if room < 0 then
        room = 0
    end

    local own, free = cost, room
    if granted then
        local q = place(-id)
        local units, ends = 0, 0
        if q then
            units, ends = held[q + 2], held[q + 3]
        end
        answer[size + 1], answer[size + 2] = units, ends
        size = size + 2
        if q and now < ends then
            -- Used only for units that the limit itself has no room for.
            own = min(cost, room)
            room = room + units
            held[q + 2] = units - (cost - own)
            need_us = max(need_us, ends - now)
        end
        if q and (now >= ends or held[q + 2] == 0) then
            dropped = dropped or {}
            dropped[q] = true
        end
    end
    if holding then
        answer[size + 1], answer[size + 2], answer[size + 3], answer[size + 4] = holds_of(id)
        size = size + 4
    end
    passes = late or passes and cost <= room

    if own > 0 and passes then
        local added -- times that a log gets before those of this check
        if holding then
            if kind == LOG then
                added = ended_holds(id, at, at - gate[g + WINDOW])
                if wanted then
                    earlier[g].ended = added
                end
            end
            live_holds(id, max(now, last))
        end
        if late and kind ~= LOG then
            a, b, own = late_charge(g, at, a, b)
        elseif kind == BUCKET then
            a = a + own * MICROS_PER_UNIT
        elseif kind == FIXED then
            a = a + own
        elseif kind == COUNTER then
            b = b + own
        else
            local per_chunk, oldest, older = fmod(b, 1024), a, 0
            for number = 1, added and #added or 0 do
                older = older + added[number][2]
            end
            if late then
                -- Beside the holds, a log has at most as many times as its limit, or as before: the
                -- newest.
                local u1, _, u2 = holds_of(id)
                local most = max(capacity - u1 - u2, 0)
                own = min(own, most)
                local excess = min(max(kept - dead + older + own - most, 0), own)
                local cut = min(excess, kept - dead)
                dead, excess = dead + cut, excess - cut
                for number = 1, added and #added or 0 do
                    local each = added[number]
                    cut = min(excess, each[2])
                    each[2], older, excess = each[2] - cut, older - cut, excess - cut
                end
            end
            a = dead < kept and oldest + dead or 0
            b = (kept - dead + older + own) * 1024 + per_chunk
            local position = a + kept - dead
            appends = appends or {}
            appends[#appends + 1] = function()
                if dead > 0 then
                    local last_dropped = floor((oldest + dead) / per_chunk)
                    log.drop(floor(oldest / per_chunk), last_dropped - (dead < kept and 1 or 0))
                end
                for number = 1, added and #added or 0 do
                    log.append(per_chunk, position, added[number][1], added[number][2])
                    position = position + added[number][2]
                end
                log.append(per_chunk, position, at, own)
            end
        end
        if own > 0 or kind == LOG then
            if not p and held[NUMBERS_MAX] then
                error('CROWDED')
            end
            p = p or #held + 1
            held[p], held[p + 1], held[p + 2] = id, held[1] - at, a
            if wide then
                held[p + 3] = b
            end
        end
    end
    if wanted then
        lease_room = min(lease_room, floor((free - own) / tonumber(ARGV[6])))
        if kind == FIXED or kind == COUNTER then
            lease_ends = min(lease_ends, at - fmod(at, gate[g + WINDOW]) + gate[g + WINDOW])
        end
        if last > now then -- the clock was set back
            lease_room = 0
        end
    end
    if passes and p then
        -- Also if a grant has paid: the limit may be slower than the one that wrote the state.
        local window = gate[g + WINDOW]
        local need = at + window
        if kind == BUCKET then
            -- One step more: the bucket is full at the end of a step.
            need = at + a / gate[g + NUMERATOR] * gate[g + DENOMINATOR] + gate[g + STEP] - 1
        elseif kind ~= LOG then
            need = at - fmod(at, window) + (kind == FIXED and window or 2 * window)
        end
        if holding and (kind == BUCKET or kind == LOG) then
            local _, t1, _, t2 = holds_of(id)
            local after = kind == BUCKET and gate[g + FULL] + gate[g + STEP] or window
            need = max(need, max(t1, t2) + after)
        end
        if apart and kind == LOG then
            logs_us = max(logs_us, need - now)
        elseif need - now > need_us then
            need_us = need - now
        end
    end
end

if wanted then
    local LEASE_MIN = 20000
    local leased = 0
    if passes and lease_room > 0 and lease_ends - now >= LEASE_MIN then
        leased = lease_room
        for g = GATE_FIRST, #gate, GATE_STEP do
            local kind, id = gate[g + KIND], gate[g + ID]
            local p, after = place(id), gate[g + WINDOW]
            local hold_ends = held_until(g, lease_ends)
            add_hold(id, leased, hold_ends)
            if kind == BUCKET then
                held[p + 2] = held[p + 2] + leased * MICROS_PER_UNIT
                after = hold_ends - lease_ends + gate[g + FULL] + gate[g + STEP]
            elseif kind == FIXED then
                held[p + 2] = held[p + 2] + leased
            elseif kind == COUNTER then
                held[p + 3] = held[p + 3] + leased
                after = 2 * gate[g + WINDOW]
            end
            need_us = max(need_us, lease_ends + after - now)
        end
    end
    answer[size + 1], answer[size + 2] = leased, leased > 0 and lease_ends or 0
    size = size + 2

    for g = GATE_FIRST, #gate, GATE_STEP do
        if gate[g + KIND] == LOG then
            -- The log after the check has, in this order: its times, holds that have ended, the time of
            -- the check, and the other holds.
            local start, alive, all = unpack(earlier[g])
            local number, blocking = all + cost + leased - gate[g + CAPACITY] + cost - 1, 0
            if passes and not granted and leased < cost and number >= 0 then
                local id, p = gate[g + ID], place(gate[g + ID])
                local u1, t1, u2, t2 = holds_of(id)
                local later = {}
                for _, each in ipairs(earlier[g].ended or later) do
                    later[#later + 1] = each
                end
                later[#later + 1] = {held[1] - held[p + 1], cost}
                later[#later + 1] = {t1, u1}
                later[#later + 1] = {t2, u2}
                if number < alive then
                    blocking = earlier[g].log.time_at(fmod(held[p + 3], 1024), start + number)
                end
                number = number - alive
                for _, each in ipairs(later) do
                    blocking = blocking == 0 and number < each[2] and each[1] or blocking
                    number = number - each[2]
                end
            end
            size = size + 1
            answer[size] = blocking
        end
    end
end

if not passes then
    answer[1] = -1 - now
elseif cost > 0 and ARGV[4] ~= 'look' then
    -- This write comes first, because a server without memory rejects it: then nothing changes.
    logs_us = (granted or wanted) and max(need_us, logs_us) or logs_us -- those are in both hashes
    keep(dropped and without(held, dropped) or held, need_us, logs_us)
    if appends then
        for _, append in ipairs(appends) do
            append()
        end
    end
end
return answer
