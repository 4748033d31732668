-- The beginning of the scripts of one subject: the time, and one rule's states. `arithmetic.lua` is
-- before it.
--
-- Each limit has one place, whatever the other limits of its rule are. The states of logs are in a
-- field of a hash of the subject. Those of all other limits are in a field of a bucket, a hash that
-- many subjects share. KEYS[1] is the hash of the states. If a rule has limits of both kinds, KEYS[1] is
-- the bucket, and KEYS[2] the hash of the logs: it has the same hash tag, so both are in one slot of a
-- cluster.
-- The states of a field are one array, `held`:
--
--     base, ttl, and for each limit: id, lag, a (, b)
--
-- base   the time of the last write, in microseconds: less than 2^52, until 2112. The bits above are
--        the version of this layout, 0
-- ttl    the hash lives at least this many milliseconds beyond base
-- id     which limit; odd if there is a b, and id % 4 = 3 for a log; negative (and with a b): units
--        granted on top, or from -2^33 down units that are leased: -id - 2^33 is the first group of
--        holds, -id - 2^34 the second (see algorithms/holds.py)
-- lag    base - lag is the time of the last admission (or refund) under this limit; of a bucket that
--        is refilled in steps, the time of its last step
-- a, b   bucket     millionths of a unit used
--        fixed      units counted in the window of that admission
--        counter    units counted in the window before, units counted in this one
--        log        position of the oldest time kept, times kept * 1024 + times in a chunk
--        granted    units left, microseconds since the epoch at which they end
--        leased     units held, microseconds since the epoch until which they are held
--
-- In the hash of logs, the value is msgpack of that array. A log's times are 7 bytes each, in
-- chunks: the fields \1 <id>.<number>:<field>.
--
-- In a bucket, the field is 8 bytes of a hash of rule and subject. The value is base in 7 bytes, the
-- second when the states end in 4 bytes instead of ttl, and msgpack of the other numbers.
-- The bucket lives as long as the longest of its states. A state that has ended equals an absent one,
-- and is deleted in passing: see `keep`.
--
-- A field that has NUMBERS_MAX numbers, of about 200 limits, gets no new states. Otherwise the limits
-- that a caller invents under one name would make each of its checks slower, until the field has more
-- numbers than the scripts can read. A rule of 16 limits has 256, with all that can belong to them.
--
-- A field has at most 64 bytes of a value; a longer one continues in the fields \2 1:<field>,
-- \2 2:<field> and so on. A hash of short values is one packed piece of memory, of half the size or
-- less.
--
-- ARGV[1] is the gate: msgpack of the rule's field and eight numbers for each limit, KIND to STEP;
-- for a bucket, one more follows: 0, or the rule's field in the hash of the logs.

local key = KEYS[1]
local gate = cmsgpack.unpack(ARGV[1])
local field = gate[1]

-- The offsets of a limit's numbers in the gate.
local KIND, ID, CAPACITY, NUMERATOR, DENOMINATOR, WINDOW, FULL, STEP = 0, 1, 2, 3, 4, 5, 6, 7
local BUCKET, FIXED, COUNTER, LOG = 1, 2, 3, 4
local GATE_FIRST, GATE_STEP, HELD_FIRST = 2, 8, 3
local MICROS_PER_UNIT = 1000000
local TIME_BYTES, PIECE_BYTES, NUMBERS_MAX = 7, 64, 640

local in_bucket, apart, log_key, log_field = #gate % GATE_STEP == 2, false, key, field
if in_bucket then
    if gate[#gate] ~= 0 then
        apart, log_key, log_field = true, KEYS[2], gate[#gate]
    end
    gate[#gate] = nil
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

-- Return the functions for a log's chunks. Made only for a log: a script makes its functions each
-- time it runs, and each costs 0.1 to 0.4 us, which is a good part of a call.
local log_of = (apart or not in_bucket) and function(g)
    local log, chunks = {}, {}
    local prefix, suffix = '\1' .. gate[g + ID] .. '.', ':' .. log_field

    function log.chunk(number)
        local found = chunks[number] or call('HGET', log_key, prefix .. number .. suffix)
        chunks[number] = found
        return found
    end

    function log.time_at(per_chunk, position)
        local number = floor(position / per_chunk)
        local offset = (position - number * per_chunk) * TIME_BYTES
        return (struct.unpack('>I7', log.chunk(number), offset + 1))
    end

    -- Return how many of the times are after `oldest`, and how many are not.
    function log.split(oldest, last, start, kept, per_chunk)
        if kept == 0 or last <= oldest then
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
            call('HDEL', log_key, prefix .. number .. suffix)
        end
    end

    function log.write(number, packed)
        chunks[number] = packed
        call('HSET', log_key, prefix .. number .. suffix, packed)
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
            log.write(number, before .. string.rep(packed, fits))
            position, count = position + fits, count - fits
        end
    end

    return log
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

local raw, pieces, held, ends_s = nil, 1, nil, 0
local logs, log_pieces, logs_end, from, name = nil, 1, 0, log_key, log_field
repeat -- twice if the logs are in another hash: theirs is read first
    logs, log_pieces, raw, pieces = raw, pieces, call('HGET', from, name), 1
    while raw and #raw == pieces * PIECE_BYTES do
        local more = call('HGET', from, '\2' .. pieces .. ':' .. name)
        if not more then
            break
        end
        raw, pieces = raw .. more, pieces + 1
    end
    local read = from == key
    from, name = key, field
until read
if raw and in_bucket then
    local base
    base, ends_s = struct.unpack('>I7I4', raw)
    held = {base, ends_s * 1000 - base / 1000, select(2, cmsgpack.unpack_limit(raw, 1000, 11))}
elseif raw then
    held = cmsgpack.unpack(raw)
end
if apart and (raw or logs) then -- one array of both; an absent one ends now
    raw, logs = raw or logs, logs and cmsgpack.unpack(logs) or {now, 0}
    held, logs_end = held or {now, 0}, logs[1] / 1000 + logs[2]
    for p = HELD_FIRST, #logs do -- four numbers for each: id, lag, a, b
        held[#held + 1] = logs[p] + (p % 4 == 0 and held[1] - logs[1] or 0)
    end
end
if raw and max(held[1], logs and logs[1] or 0) >= 2^52 then
    error('LAYOUT')
end
-- Time never rewinds for a state. Lags count from the time of the last write of any state.
local shift = raw and now - held[1] or 0
if shift > 0 then
    held[1], held[2] = now, floor(held[2] - shift / 1000)
    local p = HELD_FIRST
    while held[p] do
        held[p + 1] = held[p + 1] + shift
        p = p + ((held[p] < 0 or held[p] % 2 == 1) and 4 or 3)
    end
end
held = held or {now, 0}

-- Return the place of a limit's state in `held`, or nil.
local function place(id)
    local p = 3
    while held[p] and held[p] ~= id do
        p = p + ((held[p] < 0 or held[p] % 2 == 1) and 4 or 3)
    end
    return held[p] and p
end

-- Return `held` without the states at the dropped places; with `logs`, those of logs only (true), or
-- those of other limits only (false).
local function without(held, dropped, logs)
    local kept, p = {held[1], held[2]}, 3
    while held[p] do
        local finish = p + ((held[p] < 0 or held[p] % 2 == 1) and 4 or 3)
        local other = logs ~= nil and (math.abs(held[p]) % 4 == 3) ~= logs
        for q = p, (dropped[p] or other) and 0 or finish - 1 do
            kept[#kept + 1] = held[q]
        end
        p = finish
    end
    return kept
end

-- Write the states, and make their hash live for `need_us` from now, if that is given; if the logs are
-- in another hash, make that live for `logs_us`. The expiry is set an eighth later than necessary, and at
-- least a second from now, so that a busy key sets it occasionally, not each time. It is never shortened:
-- there are other states in the same hash.
--
-- A bucket outlives most of its states. So one charge in 128 sweeps: it deletes the states of the
-- bucket that have ended, or those among 32 random ones. So do a reset, a refund, and one new state in
-- eight: if a fourth of the states of a bucket have ended, that deletes as many as are added.
-- Tests with their own clock do not sweep. Return the server's error if the user may not run the
-- command of the sweep.
local function keep(states, need_us, logs_us)
    local to, name, had, packs, rest = key, field, pieces, in_bucket
    if apart then
        states, rest = without(states, {}, false), without(states, {}, true)
        rest[2] = floor(logs_end - rest[1] / 1000)
    end
    repeat
        local ahead_ms = (states[1] - now) / 1000 -- above 0 only if the clock was set back
        local need_ms = need_us and math.ceil(need_us / 1000) + 1 or 0
        local extend = need_us and need_ms > states[2] + ahead_ms
        if extend then
            -- A test's clock may stand still while the server's runs, so then it is an hour.
            need_ms = max(need_ms + floor(need_ms / 8), given and 3600000 or 1000)
            if packs then -- to a whole second
                local now_ms = floor(now / 1000)
                local ends = math.ceil((now_ms + need_ms) / 1000)
                need_ms, ends_s = ends * 1000 - now_ms, min(ends, 4294967295)
            end
            states[2] = floor(need_ms - ahead_ms)
        end

        local packed = ''
        if states[3] and packs then
            packed = struct.pack('>I7I4', states[1], ends_s) .. cmsgpack.pack(unpack(states, 3))
        elseif states[3] then
            packed = cmsgpack.pack(states)
        end
        local has = math.ceil(#packed / PIECE_BYTES)
        if has > 1 then
            local fields = {name, string.sub(packed, 1, PIECE_BYTES)}
            for number = 1, has - 1 do
                fields[2 * number + 1] = '\2' .. number .. ':' .. name
                fields[2 * number + 2] =
                    string.sub(packed, number * PIECE_BYTES + 1, (number + 1) * PIECE_BYTES)
            end
            call('HSET', to, unpack(fields))
        elseif packed ~= '' then
            call('HSET', to, name, packed)
        else
            call('HDEL', to, name)
        end
        for number = max(has, 1), had - 1 do
            call('HDEL', to, '\2' .. number .. ':' .. name)
        end
        if extend and call('PTTL', to) < need_ms then
            call('PEXPIRE', to, need_ms)
        end
        states, to, name, had, packs = rest, log_key, log_field, log_pieces, false
        need_us, rest = logs_us, nil
    until not states

    local due = in_bucket and (not need_us or now % (raw and 128 or 8) == 0)
    if due and not given then
        local some, dead = redis.pcall('HRANDFIELD', key, 32, 'WITHVALUES'), {}
        if some.err then
            return some
        end
        for i = 1, #some, 2 do
            local name, value = some[i], some[i + 1]
            -- A piece of a longer value has a longer name.
            if #name == 8 and struct.unpack('>I4', value, 8) * 1000000 <= now then
                dead[#dead + 1] = name
                for number = 1, #value == PIECE_BYTES and 127 or 0 do
                    dead[#dead + 1] = '\2' .. number .. ':' .. name
                end
            end
        end
        if #dead > 0 then
            call('HDEL', key, unpack(dead))
        end
    end
end
