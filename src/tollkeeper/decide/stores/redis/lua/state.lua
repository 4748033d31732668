-- What every script begins with: the time, exact arithmetic, and a rule's states of one subject.
--
-- KEYS[1] is the subject's hash, and a script touches nothing else: a hash moves between the nodes
-- of a cluster in one piece, two keys do not. A rule has one field in it, a msgpack array:
--
--     base, ttl, id, lag, a, b, id, lag, a, b, ...
--
-- base   the last time this field was written at, in microseconds
-- ttl    the hash lives at least so many milliseconds beyond base
-- id     which limit, from 1 to 2^31 - 1; negative: what was granted on top of that limit
-- lag    base - lag is the time of the last admission (or refund) under this limit
-- a, b   bucket     millionths of a unit used, 0
--        fixed      units counted in the window of that admission, 0
--        counter    units counted in the window before, units counted in this one
--        log        position of the oldest time kept, times kept * 1024 + times in a chunk
--        granted    units left, microseconds since the epoch at which they end
--
-- A log's times are 7 bytes each, in chunks: fields named <field> \1 <id> . <number of the chunk>.
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
local GATE_FIRST, GATE_STEP, HELD_FIRST, HELD_STEP = 2, 7, 3, 4
local MICROS_PER_UNIT = 1000000
local TIME_BYTES = 7

-- The server's time, not the caller's: nodes skew, and a bucket over-admits by the skew. A caller
-- with a clock of its own is a test.
local function now_us(given)
    if given and given ~= '' then
        return tonumber(given)
    end
    local time = call('TIME')
    return time[1] * 1000000 + time[2]
end

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

local chunks = {}

local function chunk_field(g, number)
    return field .. '\1' .. gate[g + ID] .. '.' .. number
end

local function chunk(g, number)
    local name = chunk_field(g, number)
    local found = chunks[name]
    if not found then
        found = call('HGET', key, name)
        chunks[name] = found
    end
    return found
end

-- The time at a position of a log.
local function time_at(g, per_chunk, position)
    local number = floor(position / per_chunk)
    local offset = (position - number * per_chunk) * TIME_BYTES
    return (struct.unpack('>I7', chunk(g, number), offset + 1))
end

local function drop_chunks(g, first, last)
    for number = first, last do
        call('HDEL', key, chunk_field(g, number))
    end
end

local raw = call('HGET', key, field)
local held = raw and cmsgpack.unpack(raw) or {0, 0}

local places

-- Where a limit's state is in `held`, or nil.
local function place(id, guess)
    if guess and held[guess] == id then
        return guess
    end
    if not places then
        places = {}
        for p = HELD_FIRST, #held, HELD_STEP do
            places[held[p]] = p
        end
    end
    return places[id]
end

-- Make `base` the time that lags count from.
local function rebase(base)
    local shift = base - held[1]
    if shift ~= 0 and raw then
        for p = HELD_FIRST, #held, HELD_STEP do
            held[p + 1] = held[p + 1] + shift
        end
        held[2] = floor(held[2] - shift / 1000)
    end
    held[1] = base
end

local function put(p, id, last, a, b)
    p = p or #held + 1
    held[p], held[p + 1], held[p + 2], held[p + 3] = id, held[1] - last, a, b
end

-- `held` without the states at some places.
local function without(dropped)
    local kept = {held[1], held[2]}
    for p = HELD_FIRST, #held, HELD_STEP do
        if not dropped[p] then
            for offset = 0, HELD_STEP - 1 do
                kept[#kept + 1] = held[p + offset]
            end
        end
    end
    return kept
end

local function write(states)
    if #states < HELD_FIRST then
        call('HDEL', key, field)
    else
        call('HSET', key, field, cmsgpack.pack(states))
    end
end

-- Write the states, and see to it that the hash lives for `need_us` from now. The expiry is moved
-- an eighth further than it must be, so that a busy key moves it now and then, not each time.
-- Never shortened: other rules have their states in the same hash.
local function keep(states, now, need_us, given)
    local ahead_ms = (states[1] - now) / 1000 -- above 0 only where the clock went back
    local need_ms = math.ceil(need_us / 1000) + 1
    local extend = need_ms > states[2] + ahead_ms
    if extend then
        need_ms = need_ms + floor(need_ms / 8)
        if given then
            need_ms = max(need_ms, 3600000) -- a test's clock may stand while the server's runs
        end
        states[2] = floor(need_ms - ahead_ms)
    end
    write(states)
    if extend and call('PTTL', key) < need_ms then
        call('PEXPIRE', key, need_ms)
    end
end
