-- Give units back to every limit of a rule, as far as time has not given them back already.
--
-- ARGV[2]  the units
-- ARGV[3]  the time in microseconds; absent or empty: the server's
-- ARGV[4]  the time at which the units were charged, in microseconds; empty: not known
-- ARGV[5]  to undo a check, instead of ARGV[2] and ARGV[4]: msgpack of four numbers for each limit,
--          its own units, the time they were charged at, the units taken from a grant, and the time
--          when that grant ends
-- ARGV[6]  the end of the lease that the units are of, in microseconds

local lease_ends = ARGV[6] and tonumber(ARGV[6])
if lease_ends and now >= lease_ends + LEASE_MAX then
    return 0 -- they may have been given back before
end
local exact = ARGV[5] and cmsgpack.unpack(ARGV[5])
if not raw and not exact then
    return 0
end
local moves = {}
dropped = dropped or {}

-- Write packed times of a log from a position on, and end the last chunk after them.
local function put(log, per_chunk, position, packed)
    local offset = fmod(position, per_chunk)
    local number, first = (position - offset) / per_chunk, 1
    while first <= #packed do
        local before = ''
        if offset > 0 then
            before = string.sub(log.chunk(number), 1, offset * TIME_BYTES)
        end
        local finish = first + (per_chunk - offset) * TIME_BYTES
        log.write(number, before .. string.sub(packed, first, finish - 1))
        number, offset, first = number + 1, 0, finish
    end
end

-- Return a log's state after the refund, or nothing; `moves` gets the changes of its chunks.
local function refunded_log(g, last, a, b, units, charged)
    local log, per_chunk = log_of(g), fmod(b, 1024)
    local kept = (b - per_chunk) / 1024
    local finish = a + kept
    if not charged then -- the oldest times of the window
        local oldest = max(now, last) - gate[g + WINDOW]
        local alive, dead = log.split(oldest, last, a, kept, per_chunk)
        local start = a + dead + min(units, alive)
        moves[#moves + 1] = function()
            local last_dropped = start < finish and start - per_chunk or finish - 1
            log.drop(floor(a / per_chunk), floor(last_dropped / per_chunk))
        end
        if start < finish then
            return last, start, (finish - start) * 1024 + per_chunk
        end
        return
    end
    local newer, older = log.split(charged, last, a, kept, per_chunk)
    local removed = min(units, older)
    if removed == 0 then
        return last, a, b
    end
    -- The newer times move down, over the removed ones.
    local start, moved = a + older - removed, newer > 0 and log.times(a + older, newer, per_chunk)
    local stop = finish - removed
    moves[#moves + 1] = function()
        if moved then
            put(log, per_chunk, start, moved)
        end
        -- The first chunk to drop: the one of the next time, or the one after it.
        local first = stop > a and math.ceil(stop / per_chunk) or floor(a / per_chunk)
        log.drop(first, floor((finish - 1) / per_chunk))
    end
    if stop > a then
        last = newer > 0 and last or log.time_at(per_chunk, stop - 1)
        return last, a, (stop - a) * 1024 + per_chunk
    end
end

-- Return one limit's state after the refund: last, a, b; or nothing, if no state is left.
local function refunded(g, last, a, b, units, charged)
    local kind, window = gate[g + KIND], gate[g + WINDOW]
    if kind == BUCKET then
        local capacity = gate[g + CAPACITY]
        local micros = min(units, capacity) * MICROS_PER_UNIT
        local elapsed = charged and last - charged or 0
        -- Rounded up to whole steps.
        elapsed = math.ceil(elapsed / gate[g + STEP]) * gate[g + STEP]
        if elapsed >= gate[g + FULL] then
            micros = 0
        elseif elapsed > 0 then
            -- Rounded down, as in each refill that the bucket has made since.
            micros = micros - multiply_divide(elapsed, gate[g + NUMERATOR], gate[g + DENOMINATOR])
        end
        -- A correction gives room, also if the capacity was lowered. Otherwise units above the capacity
        -- stay used: the limit may be the lower one of the charge.
        local used = (charged and a or min(a, capacity * MICROS_PER_UNIT)) - micros
        if micros <= 0 then
            return last, a
        elseif used > 0 then
            return last, used
        end
    elseif kind == FIXED then
        charged = charged or max(last, now)
        if charged - fmod(charged, window) ~= last - fmod(last, window) then
            return last, a
        elseif a > units then
            return last, a - units
        end
    elseif kind == COUNTER then
        local at, previous, current = rolled(window, last, a, b, now)
        charged = charged or at
        local ago = (at - fmod(at, window) - charged + fmod(charged, window)) / window
        if ago == 0 then
            current = max(current - units, 0)
        elseif ago == 1 then
            previous = max(previous - units, 0)
        else
            return last, a, b
        end
        if previous > 0 or current > 0 then
            return at, previous, current
        end
    else
        return refunded_log(g, last, a, b, units, charged)
    end
end

-- Return a state after units of a lease were given back, or nothing; see the algorithms' give_back.
local function given_back(g, last, a, b, units)
    local kind, id, window = gate[g + KIND], gate[g + ID], gate[g + WINDOW]
    local hold_ends, until_back = held_until(g, lease_ends)
    if now >= until_back then
        return last, a, b
    elseif kind == LOG and b >= 1024 and last >= lease_ends then
        return refunded_log(g, last, a, b, units, lease_ends)
    elseif kind == FIXED or kind == COUNTER then
        local at = kind == FIXED and last or max(now, last)
        if at - fmod(at, window) ~= lease_ends - 1 - fmod(lease_ends - 1, window) then
            return refunded(g, last, a, b, units, lease_ends - 1)
        end
        if kind == COUNTER and holds_of(id) > 0 then
            last, a, b = rolled(window, last, a, b, now)
        end
    end
    local u1, t1, u2, t2 = holds_of(id)
    if u1 > 0 and hold_ends <= t1 then
        units, u1 = min(units, u1), max(u1 - units, 0)
    elseif u2 > 0 and hold_ends <= t2 then
        units, u2 = min(units, u2), max(u2 - units, 0)
    else
        units = 0
    end
    put_holds(id, u1, t1, u2, t2)
    if kind == BUCKET then
        a = max(a - units * MICROS_PER_UNIT, 0)
    elseif kind == FIXED then
        a = max(a - units, 0)
    elseif kind == COUNTER then
        b = max(b - units, 0)
    end
    if u1 + u2 > 0 or (kind == LOG and b >= 1024 or kind ~= LOG and a + (b or 0) > 0) then
        return last, a, b
    end
end

local changed, need_us = false, 0
for g = GATE_FIRST, #gate, GATE_STEP do
    local i = (g - GATE_FIRST) / GATE_STEP * 4
    local units = exact and exact[i + 1] or tonumber(ARGV[2])
    local charged = exact and exact[i + 2] or tonumber(ARGV[4])
    local p = place(gate[g + ID])
    if p and units > 0 then
        local wide = gate[g + ID] % 2 == 1
        local b = wide and held[p + 3]
        local last, a
        local before = b
        last, a = held[1] - held[p + 1], held[p + 2]
        if lease_ends then
            last, a, b = given_back(g, last, a, b, units)
        else
            last, a, b = refunded(g, last, a, b, units, charged)
        end
        if not last and holding and holds_of(gate[g + ID]) > 0 then -- what is held stays held
            last, a = held[1] - held[p + 1], 0
            b = gate[g + KIND] == LOG and fmod(before, 1024) or 0
        end
        if last then
            held[p + 1], held[p + 2] = held[1] - last, a
            if wide then
                held[p + 3] = b
            end
        else
            dropped[p] = true
        end
        changed = true
    end
    if exact and exact[i + 3] > 0 and now < exact[i + 4] then
        local id = -gate[g + ID]
        local q = place(id)
        local drawn, ends = exact[i + 3], exact[i + 4]
        if q then
            drawn, ends = drawn + held[q + 2], max(ends, held[q + 3])
        end
        q = q or #held + 1
        held[q], held[q + 1], held[q + 2], held[q + 3] = id, 0, drawn, ends
        need_us = max(need_us, ends - now)
        changed = true
    end
end
if changed then
    need_us = need_us > 0 and need_us
    keep(without(held, dropped), need_us, need_us)
    for _, move in ipairs(moves) do
        move()
    end
end
return 1
