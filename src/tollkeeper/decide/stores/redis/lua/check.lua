-- Decide one request under all the limits of a rule: every limit has room, or none is charged.
--
-- ARGV[2]  the cost in units
-- ARGV[3]  the time in microseconds; absent or empty: the server's
-- ARGV[4]  present: only look
--
-- The script finds out whether the request passes, and charges it. All else that a decision says
-- (what remains, when to come back) the caller works out from the states as they were before, with
-- the same code that is the reference for every engine. So the answer is a flat array:
--
--     the time, or -1 - the time when denied; then for each limit
--     bucket, fixed   last, a                     last is -1 where there is no state
--     counter         last, a, b
--     log             last, live times, the time that must leave first for the cost to fit
--
-- Where anything is granted, each limit has two more numbers (units, end), and a log answers with
-- its live times themselves in place of the one.

local cost = tonumber(ARGV[2])
local now = now_us(ARGV[3])
local count = (#gate - GATE_FIRST + 1) / GATE_STEP

-- As a rule the states are just where the gate's order puts them, and nothing else is there.
local granted = false
if raw then
    granted = #held ~= HELD_FIRST - 1 + count * HELD_STEP
    for i = 0, count - 1 do
        if held[HELD_FIRST + i * HELD_STEP] ~= gate[GATE_FIRST + i * GATE_STEP + ID] then
            granted = true
        end
    end
    if granted then
        granted = false
        for p = HELD_FIRST, #held, HELD_STEP do
            granted = granted or held[p] < 0
        end
    end
end

-- How many of a log's times are of the window that ends at `at`, and how many before are not.
local function live(g, at, last, start, kept, per_chunk)
    local oldest = at - gate[g + WINDOW]
    if last <= oldest then
        return 0, kept
    end
    if time_at(g, per_chunk, start) > oldest then
        return kept, 0
    end
    local dead, alive = 1, kept - 1 -- so many are dead for sure, and this one is alive
    while dead < alive do
        local middle = floor((dead + alive) / 2)
        if time_at(g, per_chunk, start + middle) > oldest then
            alive = middle
        else
            dead = middle + 1
        end
    end
    return kept - dead, dead
end

local function live_times(g, start, alive, per_chunk)
    local parts = {}
    local finish = start + alive
    while start < finish do
        local number = floor(start / per_chunk)
        local stop = min((number + 1) * per_chunk, finish)
        local first = (start - number * per_chunk) * TIME_BYTES + 1
        local last = (stop - number * per_chunk) * TIME_BYTES
        parts[#parts + 1] = string.sub(chunk(g, number), first, last)
        start = stop
    end
    return table.concat(parts)
end

local answer, passes, charges = {now}, true, {}

for i = 0, count - 1 do
    local g = GATE_FIRST + i * GATE_STEP
    local kind, id, capacity = gate[g + KIND], gate[g + ID], gate[g + CAPACITY]
    local p = raw and place(id, HELD_FIRST + i * HELD_STEP)
    local last, a, b = -1, 0, 0
    if p then
        last, a, b = held[1] - held[p + 1], held[p + 2], held[p + 3]
    end
    local at = max(last, now)
    local charge = {p = p, at = at, own = cost}
    local room
    answer[#answer + 1] = last
    if kind == BUCKET then
        answer[#answer + 1] = a
        charge.used = p and used_now(g, last, a, now) or 0
        room = floor((capacity * MICROS_PER_UNIT - charge.used) / MICROS_PER_UNIT)
    elseif kind == FIXED then
        answer[#answer + 1] = a
        local window = gate[g + WINDOW]
        if last - fmod(last, window) ~= at - fmod(at, window) then
            a = 0
        end
        charge.used = a
        room = capacity - a
    elseif kind == COUNTER then
        answer[#answer + 1] = a
        answer[#answer + 1] = b
        local window = gate[g + WINDOW]
        if p then
            charge.at, charge.previous, charge.current = rolled(window, last, a, b, now)
        else
            charge.previous, charge.current = 0, 0
        end
        -- Up: a request of the window before counts until it has faded out entirely.
        local left = window - fmod(charge.at, window)
        local faded, rest = multiply_divide(left, charge.previous, window)
        room = capacity - charge.current - faded - (rest > 0 and 1 or 0)
    else
        local alive, dead, per_chunk = 0, 0, gate[g + FULL]
        local blocking = 0
        if p then
            per_chunk = fmod(b, 1024)
            local kept = (b - per_chunk) / 1024
            alive, dead = live(g, at, last, a, kept, per_chunk)
            room = capacity - alive
            if granted then
                blocking = live_times(g, a + dead, alive, per_chunk)
            elseif cost > room and cost <= capacity then
                blocking = time_at(g, per_chunk, a + kept - capacity + cost - 1)
            end
        else
            room = capacity
            blocking = granted and '' or 0
        end
        answer[#answer + 1] = alive
        answer[#answer + 1] = blocking
        charge.start, charge.dead, charge.alive, charge.per_chunk = a, dead, alive, per_chunk
    end
    room = max(room, 0)
    if granted then
        local q = place(-id)
        local units, ends = 0, 0
        if q then
            units, ends = held[q + 2], held[q + 3]
        end
        answer[#answer + 1] = units
        answer[#answer + 1] = ends
        if units > 0 and now < ends then
            -- Drawn on only for what the limit itself has no room for.
            charge.own = min(cost, room)
            charge.q, charge.left, charge.ends = q, units - (cost - charge.own), ends
            room = room + units
        elseif q then
            charge.q, charge.left = q, 0
        end
    end
    charges[i + 1] = charge
    passes = passes and cost <= room
end

if not passes then
    answer[1] = -now - 1
    return answer
end
if ARGV[4] or cost == 0 then
    return answer
end

rebase(max(held[1], now))
local need_us, written, dropped = 0, {}, {}
for i = 0, count - 1 do
    local g = GATE_FIRST + i * GATE_STEP
    local kind, id, charge = gate[g + KIND], gate[g + ID], charges[i + 1]
    local at, own, window = charge.at, charge.own, gate[g + WINDOW]
    if own > 0 then
        if kind == BUCKET then
            local used = charge.used + own * MICROS_PER_UNIT
            put(charge.p, id, at, used, 0)
            need_us = max(need_us, at - now + used / gate[g + NUMERATOR] * gate[g + DENOMINATOR])
        elseif kind == FIXED then
            put(charge.p, id, at, charge.used + own, 0)
            need_us = max(need_us, at - fmod(at, window) + window - now)
        elseif kind == COUNTER then
            put(charge.p, id, at, charge.previous, charge.current + own)
            need_us = max(need_us, at - fmod(at, window) + 2 * window - now)
        else
            local start = charge.alive > 0 and charge.start + charge.dead or 0
            put(charge.p, id, at, start, (charge.alive + own) * 1024 + charge.per_chunk)
            need_us = max(need_us, at + window - now)
            written[#written + 1] = {g, charge, start}
        end
    end
    if charge.q and charge.left > 0 then
        held[charge.q + 1], held[charge.q + 2] = 0, charge.left
        need_us = max(need_us, charge.ends - now)
    elseif charge.q then
        dropped[charge.q] = true
    end
end
-- First of all writes the one that a full server refuses: then nothing has changed.
keep(granted and without(dropped) or held, now, need_us, ARGV[3] and ARGV[3] ~= '')

for _, log in ipairs(written) do
    local g, charge, start = log[1], log[2], log[3]
    local per_chunk, left = charge.per_chunk, charge.own
    if charge.dead > 0 then
        local first = charge.start + charge.dead -- of those alive, were there any
        local last = charge.alive > 0 and floor(first / per_chunk) - 1 or floor(first / per_chunk)
        drop_chunks(g, floor(charge.start / per_chunk), last)
    end
    local time = struct.pack('>I7', charge.at)
    local position = start + charge.alive
    while left > 0 do
        local number = floor(position / per_chunk)
        local offset = position - number * per_chunk
        local fits = min(per_chunk - offset, left)
        local before = offset > 0 and string.sub(chunk(g, number), 1, offset * TIME_BYTES) or ''
        call('HSET', key, chunk_field(g, number), before .. string.rep(time, fits))
        position, left = position + fits, left - fits
    end
end
return answer
