-- What every script begins with: the time, exact arithmetic, and a rule's states of one subject.
--
-- KEYS[1] is the subject's hash, and a script touches nothing else: a hash moves between the nodes
-- of a cluster in one piece, two keys do not. A rule's states are one msgpack array:
--
--     base, ttl, and for each limit: id, lag, a (, b)
--
-- base   the last time this was written at, in microseconds
-- ttl    the hash lives at least so many milliseconds beyond base
-- id     which limit; odd where there is a b; negative (and with a b): what was granted on top
-- lag    base - lag is the time of the last admission (or refund) under this limit
-- a, b   bucket     millionths of a unit used
--        fixed      units counted in the window of that admission
--        counter    units counted in the window before, units counted in this one
--        log        position of the oldest time kept, times kept * 1024 + times in a chunk
--        granted    units left, microseconds since the epoch at which they end
--
-- It lies in the rule's field, 64 bytes at most; what is longer goes on in the fields \2 1:<field>,
-- \2 2:<field> and so on. A hash of short values is one packed piece of memory, of half the size or
-- less. A log's times are 7 bytes each, in chunks: the fields \1 <id>.<number>:<field>.
--
-- ARGV[1] is the gate: msgpack of the rule's field, then seven numbers for each limit, see KIND to
-- FULL. Numbers here are doubles. Everything below stays under 2^53, where those are exact.

local call, fmod, floor, max, min = redis.call, math.fmod, math.floor, math.max, math.min
local key = KEYS[1]
local gate = cmsgpack.unpack(ARGV[1])
local field = gate[1]

-- Where a limit's numbers are in the gate, counted from the limit's first.
local KIND, ID, CAPACITY, NUMERATOR, DENOMINATOR, WINDOW, FULL = 0, 1, 2, 3, 4, 5, 6
local BUCKET, FIXED, COUNTER, LOG = 1, 2, 3, 4
local GATE_FIRST, GATE_STEP, HELD_FIRST = 2, 7, 3
local MICROS_PER_UNIT = 1000000
local TIME_BYTES, PIECE_BYTES = 7, 64

-- floor(x * n / d) and the rest, exactly, for x * n / d and n < 2^50 and d < 2^45.
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

-- What is used of a bucket now. Down: a part of a millionth that has not come in cannot be spent.
local function used_now(g, last, used, now)
    used = min(used, gate[g + CAPACITY] * MICROS_PER_UNIT)
    local elapsed = now - last
    if elapsed <= 0 then
        return used
    end
    if elapsed >= gate[g + FULL] then
        return 0
    end
    return max(used - multiply_divide(elapsed, gate[g + NUMERATOR], gate[g + DENOMINATOR]), 0)
end

-- The counter's time and two counts as of now.
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

-- A log's chunks. Made only where there is a log: functions cost time to make, and a script makes
-- its own anew each time it runs.
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

    -- How many of the times kept are after `oldest`, and how many are not.
    function log.alive_and_dead(oldest, last, start, kept, per_chunk)
        if last <= oldest then
            return 0, kept
        end
        if log.time_at(per_chunk, start) > oldest then
            return kept, 0
        end
        local dead, alive = 1, kept - 1 -- so many are dead for sure, and this one is alive
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

    -- The packed times of so many positions.
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

-- The server's time, not the caller's: nodes skew, and a bucket over-admits by the skew. A caller
-- that gives a time is a test.
local now = ARGV[3]
local given = now and now ~= ''
if given then
    now = tonumber(now)
else
    local time = call('TIME')
    now = time[1] * 1000000 + time[2]
end

-- Time never rewinds for a state, and lags count from the latest that any was written at.
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

-- Where a limit's state is in `held`, or nil.
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

-- `held` without the states at some places.
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

-- Write the states, and see to it that the hash lives for `need_us` from now. The expiry is moved
-- an eighth further than it must be, and to a second from now at least, so that a busy key moves
-- it now and then, not each time. Never shortened: other rules have states in the same hash.
local function keep(states, need_us)
    local ahead_ms = (states[1] - now) / 1000 -- above 0 only where the clock went back
    local need_ms = math.ceil(need_us / 1000) + 1
    local extend = need_ms > states[2] + ahead_ms
    if extend then
        -- A test's clock may stand while the server's runs: an hour then.
        need_ms = max(need_ms + floor(need_ms / 8), given and 3600000 or 1000)
        states[2] = floor(need_ms - ahead_ms)
    end
    write(states)
    if extend and call('PTTL', key) < need_ms then
        call('PEXPIRE', key, need_ms)
    end
end
