-- The beginning of every script: the time, exact arithmetic, and one rule's states of a subject.
--
-- KEYS[1] is the subject's hash, the only key that a script accesses: a hash moves between the nodes
-- of a cluster in one piece, two keys do not. A rule's states are one msgpack array:
--
--     base, ttl, and for each limit: id, lag, a (, b)
--
-- base   the time of the last write, in microseconds
-- ttl    the hash lives at least this many milliseconds beyond base
-- id     which limit; odd if there is a b; negative (and with a b): units granted on top
-- lag    base - lag is the time of the last admission (or refund) under this limit; of a bucket that
--        is refilled in steps, the time of its last step
-- a, b   bucket     millionths of a unit used
--        fixed      units counted in the window of that admission
--        counter    units counted in the window before, units counted in this one
--        log        position of the oldest time kept, times kept * 1024 + times in a chunk
--        granted    units left, microseconds since the epoch at which they end
--
-- The rule's field has at most 64 bytes of it; a longer array continues in the fields \2 1:<field>,
-- \2 2:<field> and so on. A hash of short values is one packed piece of memory, of half the size or
-- less. A log's times are 7 bytes each, in chunks: the fields \1 <id>.<number>:<field>.
--
-- ARGV[1] is the gate: msgpack of the rule's field and eight numbers for each limit, KIND to STEP.
-- Lua's numbers are doubles. Every number below stays under 2^53, where doubles are exact.

local call, fmod, floor, max, min = redis.call, math.fmod, math.floor, math.max, math.min
local key = KEYS[1]
local gate = cmsgpack.unpack(ARGV[1])
local field = gate[1]

-- The offsets of a limit's numbers in the gate.
local KIND, ID, CAPACITY, NUMERATOR, DENOMINATOR, WINDOW, FULL, STEP = 0, 1, 2, 3, 4, 5, 6, 7
local BUCKET, FIXED, COUNTER, LOG = 1, 2, 3, 4
local GATE_FIRST, GATE_STEP, HELD_FIRST = 2, 8, 3
local MICROS_PER_UNIT = 1000000
local TIME_BYTES, PIECE_BYTES = 7, 64

-- Return floor(x * n / d) and the remainder, exactly, for x * n / d and n < 2^50 and d < 2^45.
local function multiply_divide(x, n, d)
    local product = x * n
    if product < 9007199254740992 then -- 2^53
        local rest = fmod(product, d)
        return (product - rest) / d, rest
    end
    -- Long multiplication in base 128: rest * 128 and digit * x both stay below 2^52.
    local whole = (x - fmod(x, d)) / d
    x = x - whole * d
    local quotient, rest, left, scale = 0, 0, n, 562949953421312 -- 128^7
    while scale >= 1 do
        local digit = floor(left / scale)
        left = left - digit * scale
        local part = rest * 128 + digit * x
        rest = fmod(part, d)
        quotient = quotient * 128 + (part - rest) / d
        scale = scale / 128
    end
    return whole * n + quotient, rest
end

-- Return the amount used of a bucket now, and the time of its last refill. The refill is rounded
-- down: a part of a millionth that is not refilled yet cannot be spent. A full bucket is as new: its
-- next step counts from now.
local function used_now(g, last, used, now)
    used = min(used, gate[g + CAPACITY] * MICROS_PER_UNIT)
    local elapsed = now - last
    if elapsed <= 0 then
        return used, last
    end
    if gate[g + STEP] > 1 then
        elapsed = elapsed - fmod(elapsed, gate[g + STEP])
    end
    if elapsed >= gate[g + FULL] then
        return 0, now
    end
    used = used - multiply_divide(elapsed, gate[g + NUMERATOR], gate[g + DENOMINATOR])
    if used <= 0 then
        return 0, now
    end
    return used, last + elapsed
end

-- Return a window counter's time and its two counts as of now.
local function rolled(window, last, previous, current, now)
    if now <= last then
        return last, previous, current
    end
    local windows = (now - fmod(now, window) - last + fmod(last, window)) / window
    if windows == 0 then
        return now, previous, current
    end
    return now, windows == 1 and current or 0, 0
end

-- Return the functions for a log's chunks. Made only for a log: a script makes its functions
-- each time it runs, which costs time.
local function log_of(g)
    local log, chunks = {}, {}
    local prefix, suffix = '\1' .. gate[g + ID] .. '.', ':' .. field

    function log.chunk(number)
        local found = chunks[number] or call('HGET', key, prefix .. number .. suffix)
        chunks[number] = found
        return found
    end

    function log.time_at(per_chunk, position)
        local number = floor(position / per_chunk)
        local offset = (position - number * per_chunk) * TIME_BYTES
        return (struct.unpack('>I7', log.chunk(number), offset + 1))
    end

    -- Return how many of the times are after `oldest`, and how many are not.
    function log.alive_and_dead(oldest, last, start, kept, per_chunk)
        if last <= oldest then
            return 0, kept
        end
        if log.time_at(per_chunk, start) > oldest then
            return kept, 0
        end
        local dead, alive = 1, kept - 1 -- the first is dead for sure, and the last is alive
        while dead < alive do
            local middle = floor((dead + alive) / 2)
            if log.time_at(per_chunk, start + middle) > oldest then
                alive = middle
            else
                dead = middle + 1
            end
        end
        return kept - dead, dead
    end

    -- Return the packed times of `count` positions.
    function log.times(start, count, per_chunk)
        local parts, finish = {}, start + count
        while start < finish do
            local number = floor(start / per_chunk)
            local stop = min((number + 1) * per_chunk, finish)
            local first = (start - number * per_chunk) * TIME_BYTES + 1
            local last = (stop - number * per_chunk) * TIME_BYTES
            parts[#parts + 1] = string.sub(log.chunk(number), first, last)
            start = stop
        end
        return table.concat(parts)
    end

    function log.drop(first, last)
        for number = first, last do
            call('HDEL', key, prefix .. number .. suffix)
        end
    end

    -- Write packed times from a position on, and end the last chunk after them.
    function log.put(per_chunk, position, packed)
        local offset = fmod(position, per_chunk)
        local number, first = (position - offset) / per_chunk, 1
        while first <= #packed do
            local before = ''
            if offset > 0 then
                before = string.sub(log.chunk(number), 1, offset * TIME_BYTES)
            end
            local finish = first + (per_chunk - offset) * TIME_BYTES
            local part = string.sub(packed, first, finish - 1)
            call('HSET', key, prefix .. number .. suffix, before .. part)
            number, offset, first = number + 1, 0, finish
        end
    end

    function log.append(per_chunk, position, time, count)
        local packed = struct.pack('>I7', time)
        while count > 0 do
            local number = floor(position / per_chunk)
            local offset = position - number * per_chunk
            local fits = min(per_chunk - offset, count)
            local before = ''
            if offset > 0 then
                before = string.sub(log.chunk(number), 1, offset * TIME_BYTES)
            end
            call('HSET', key, prefix .. number .. suffix, before .. string.rep(packed, fits))
            position, count = position + fits, count - fits
        end
    end

    return log
end

local raw = call('HGET', key, field)
local pieces = 1
while raw and #raw == pieces * PIECE_BYTES do
    local more = call('HGET', key, '\2' .. pieces .. ':' .. field)
    if not more then
        break
    end
    raw, pieces = raw .. more, pieces + 1
end
local held = raw and cmsgpack.unpack(raw) or {0, 0}

local function width(id)
    return (id < 0 or id % 2 == 1) and 4 or 3
end

-- The server's time, not the caller's: clocks of nodes differ, and a bucket would admit too much
-- by the difference. Only tests give a time.
local now = ARGV[3]
local given = now and now ~= ''
if given then
    now = tonumber(now)
else
    local time = call('TIME')
    now = time[1] * 1000000 + time[2]
end

-- Time never rewinds for a state. Lags count from the time of the last write of any state.
if raw then
    local shift = now - held[1]
    if shift > 0 then
        held[1], held[2] = now, floor(held[2] - shift / 1000)
        local p = HELD_FIRST
        while held[p] do
            held[p + 1] = held[p + 1] + shift
            p = p + width(held[p])
        end
    end
else
    held[1] = now
end

local places

-- Return the place of a limit's state in `held`, or nil.
local function place(id)
    if not places then
        places = {}
        local p = HELD_FIRST
        while held[p] do
            places[held[p]] = p
            p = p + width(held[p])
        end
    end
    return places[id]
end

-- Return `held` without the states at the dropped places.
local function without(dropped)
    local kept, p = {held[1], held[2]}, HELD_FIRST
    while held[p] do
        local finish = p + width(held[p])
        for q = p, dropped[p] and 0 or finish - 1 do
            kept[#kept + 1] = held[q]
        end
        p = finish
    end
    return kept
end

local function write(states)
    local packed = #states >= HELD_FIRST and cmsgpack.pack(states) or ''
    if #packed > PIECE_BYTES then
        local arguments = {}
        for number = 0, math.ceil(#packed / PIECE_BYTES) - 1 do
            arguments[#arguments + 1] = number == 0 and field or '\2' .. number .. ':' .. field
            arguments[#arguments + 1] =
                string.sub(packed, number * PIECE_BYTES + 1, (number + 1) * PIECE_BYTES)
        end
        call('HSET', key, unpack(arguments))
    elseif packed ~= '' then
        call('HSET', key, field, packed)
    else
        call('HDEL', key, field)
    end
    for number = max(math.ceil(#packed / PIECE_BYTES), 1), pieces - 1 do
        call('HDEL', key, '\2' .. number .. ':' .. field)
    end
end

-- Write the states, and make the hash live for `need_us` from now. The expiry is set an eighth later
-- than necessary, and at least a second from now, so that a busy key sets it occasionally, not each
-- time. It is never shortened: other rules have states in the same hash.
local function keep(states, need_us)
    local ahead_ms = (states[1] - now) / 1000 -- above 0 only if the clock was set back
    local need_ms = math.ceil(need_us / 1000) + 1
    local extend = need_ms > states[2] + ahead_ms
    if extend then
        -- A test's clock may stand still while the server's runs, so then it is an hour.
        need_ms = max(need_ms + floor(need_ms / 8), given and 3600000 or 1000)
        states[2] = floor(need_ms - ahead_ms)
    end
    write(states)
    if extend and call('PTTL', key) < need_ms then
        call('PEXPIRE', key, need_ms)
    end
end
