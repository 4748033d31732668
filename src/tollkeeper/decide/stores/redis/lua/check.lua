-- Decide one request by all limits of a rule: every limit has room, or none is charged.
--
-- ARGV[2]  the cost in units
-- ARGV[3]  the time in microseconds; absent or empty: the server's
-- ARGV[4]  present: decide, but spend nothing
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
-- live times instead of the one.
--
-- The loop puts each limit's state after the request into `held`. If one limit denies, `held` is not
-- written, so nothing changes.

local cost = tonumber(ARGV[2])
local limits = (#gate - GATE_FIRST + 1) / GATE_STEP

-- Usually the states are in the order of the gate, and there are no others.
local in_place, granted = raw, false
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
            granted = granted or held[p] < 0
            p = p + ((held[p] < 0 or held[p] % 2 == 1) and 4 or 3)
        end
    end
end

local answer, size, passes, need_us = {now}, 1, true, 0
local dropped, appends -- places of grants that have ended; writes to logs

for i = 0, limits - 1 do
    local g = GATE_FIRST + i * GATE_STEP
    local kind, id, capacity = gate[g + KIND], gate[g + ID], gate[g + CAPACITY]
    local p
    if in_place then
        p, next_p = next_p, next_p + (id % 2 == 1 and 4 or 3)
    elseif raw then
        p = place(held, id)
    end
    local last, a, b, room, log, kept, dead = -1, 0, 0, capacity, nil, 0, 0
    local wide = id % 2 == 1
    if p then
        last, a, b = held[1] - held[p + 1], held[p + 2], wide and held[p + 3] or 0
    end
    local at = max(last, now)
    answer[size + 1], answer[size + 2] = last, a
    size = size + 2
    if kind == BUCKET then
        if p then
            -- The refill is rounded down: a part of a millionth that is not refilled yet cannot be
            -- spent. A full bucket is as new: its next step counts from now.
            a, at = min(a, capacity * MICROS_PER_UNIT), last
            local elapsed = now - last
            if elapsed > 0 then
                if gate[g + STEP] > 1 then
                    elapsed = elapsed - fmod(elapsed, gate[g + STEP])
                end
                if elapsed < gate[g + FULL] then
                    a = a - multiply_divide(elapsed, gate[g + NUMERATOR], gate[g + DENOMINATOR])
                    at = last + elapsed
                else
                    a = 0
                end
                if a <= 0 then
                    a, at = 0, now
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
        if p then
            local window = gate[g + WINDOW]
            at, a, b = rolled(window, last, a, b, now)
            -- Rounded up: a request of the previous window counts until it has faded out entirely.
            local faded, rest = multiply_divide(window - fmod(at, window), a, window)
            room = capacity - b - faded - (rest > 0 and 1 or 0)
        end
    else
        log = log_of(g)
        b = p and b or gate[g + FULL] -- for a new log, the times per chunk
        local per_chunk, alive, blocking = fmod(b, 1024), 0, granted and '' or 0
        if p then
            kept = (b - per_chunk) / 1024
            alive, dead = log.alive_and_dead(at - gate[g + WINDOW], last, a, kept, per_chunk)
            room = capacity - alive
            if granted then
                blocking = log.times(a + dead, alive, per_chunk)
            elseif cost > room and cost <= capacity then
                blocking = log.time_at(per_chunk, a + kept - capacity + cost - 1)
            end
        end
        answer[size], answer[size + 1] = alive, blocking
        size = size + 1
    end
    room = max(room, 0)

    local own = cost
    if granted then
        local q = place(held, -id)
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
    passes = passes and cost <= room

    if own > 0 and passes then
        if kind == BUCKET then
            a = a + own * MICROS_PER_UNIT
        elseif kind == FIXED then
            a = a + own
        elseif kind == COUNTER then
            b = b + own
        else
            local per_chunk, oldest = fmod(b, 1024), a
            a = dead < kept and oldest + dead or 0
            b = (kept - dead + own) * 1024 + per_chunk
            local position = a + kept - dead
            appends = appends or {}
            appends[#appends + 1] = function()
                if dead > 0 then
                    local last_dropped = floor((oldest + dead) / per_chunk)
                    log.drop(floor(oldest / per_chunk), last_dropped - (dead < kept and 1 or 0))
                end
                log.append(per_chunk, position, at, own)
            end
        end
        p = p or #held + 1
        held[p], held[p + 1], held[p + 2] = id, held[1] - at, a
        if wide then
            held[p + 3] = b
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
        need_us = max(need_us, need - now)
    end
end

if not passes then
    answer[1] = -1 - now
elseif cost > 0 and not ARGV[4] then
    -- This write comes first, because a server without memory rejects it: then nothing changes.
    keep(dropped and without(held, dropped) or held, need_us)
    if appends then
        for _, append in ipairs(appends) do
            append()
        end
    end
end
return answer
