-- The beginning of the scripts of limits that several regions share. `arithmetic.lua` is before it, and
-- `decide/regional.py` is the specification: these scripts agree with it, call for call.
--
-- All keys of a call are in one slot:
--
-- KEYS[1]  the subjects that are due: a sorted set by time. A member is the end of a state's key
-- KEYS[2]  the shares of this region
-- KEYS     from the third on: the state of each subject
-- ARGV[1]  the time in microseconds; empty: the server's
--
-- Shares are VERSION, epoch and share (two numbers); then the leader's fencing token, the lowest share of
-- late (two numbers), when it rose, and the names of the regions that are live, each between two spaces.
--
-- A gate is its length in two bytes, and msgpack of numbers: the mode (0: exact, 1: eventual), the longest
-- window, and for each limit KIND to STEP. It is part of the state, because a report needs it.
--
-- A state begins with VERSION, epoch and share, as the shares that it was last used with do, and its gate. So
-- one comparison shows that nothing has changed since. Then follow
--
--     the total; PART: three numbers, see `slots_with`; DUE: if not 0, the subject is due since that
--     time or longer; the millisecond at which the key expires; when a grant ends; DEMAND: three numbers
--     of each limit, `Ledger.numbers`, with times in microseconds; a log has their number first
--     the generation, the accepted total, the granted units, and three texts, each after its length:
--     DEMANDS   of each other region that has a demand: when it said so, the units, its name between spaces
--     RETURNED  msgpack of two numbers for each limit: the millionths returned, and those accepted by all
--               other regions; empty if there are none
--     SEEN      msgpack of SEEN_NAME to SEEN_PART and two more numbers for each limit, for each other region:
--               the millionths returned and those that certainly counted at SEEN_AT; empty if there are none
--
-- A check is the call that counts, and takes about as long as that of a regional limit. So it reads shares
-- and state in one call, unpacks only the numbers that it needs, and copies the rest. It sets the expiry
-- occasionally, and notes that the subject is due only if it is not due already. `struct` is much faster
-- than msgpack. A script makes its functions each time it runs, and each costs 0.1 us: those that a check
-- seldom needs are in `regional_state.lua`, and those of eventual limits in `regional_demand.lua`.

local VERSION, EXACT, MICROS_PER_UNIT, DEMAND_US, PARTS, REPEAT_US = 2, 0, 1000000, 2000000, 1000, 1000000
local SHARE_BYTES, SHARES_BYTES = 14, 34
-- The offsets of a limit's numbers in the gate, and its kinds: up to LEAKY it is a bucket.
local CAPACITY, NUMERATOR, DENOMINATOR, WINDOW, STEP = 1, 2, 3, 4, 5
local MODE, LONGEST, GATE_FIRST, GATE_STEP = 2, 3, 4, 6
local LEAKY, COUNTER, LOG = 2, 4, 5
-- A level never has more millionths: doubles count exactly up to here.
local LEVEL_MAX = 9000000000000000

local now = ARGV[1]
local given = now ~= ''
if given then
    now = tonumber(now)
else
    local time = call('TIME')
    now = time[1] * 1000000 + time[2]
end

-- The second is the state of KEYS[3].
local fetched = call('MGET', unpack(KEYS, 2, min(#KEYS, 3)))
local packed_shares, share_n, share_d = fetched[1], 0, 1
if packed_shares and #packed_shares >= SHARES_BYTES and string.byte(packed_shares) == VERSION then
    share_n, share_d = struct.unpack('>I3I3', packed_shares, 9)
else
    packed_shares = nil -- there is only a token, or it is damaged or another version's
end

-- Bring a ledger to a time: drain a bucket, begin a window, drop the groups of a log that have left. Return its
-- levels.
local function bring(gate, g, ledger, at, n, d)
    local kind = gate[g]
    if kind <= LEAKY then
        local last, known, own = ledger[1], ledger[2], ledger[3]
        if known == 0 and own == 0 then
            ledger[1] = at
            return 0, 0
        end
        local elapsed = at - last
        if elapsed <= 0 then
            return known, own
        end
        if gate[g + STEP] > 1 then
            elapsed = elapsed - (elapsed % gate[g + STEP])
        end
        -- Rounds down: neither a part of a step nor a part of a millionth can be spent.
        local drained = elapsed / gate[g + DENOMINATOR] * gate[g + NUMERATOR]
        if n > 0 and drained > 2 * (known + own / n * d) + 2 then
            ledger[1], ledger[2], ledger[3] = at, 0, 0
            return 0, 0
        elseif n == 0 and drained > 2 * known + 2 then
            drained = known
        elseif drained < 1125899906842624 then -- 2^50
            drained = multiply_divide(elapsed, gate[g + NUMERATOR], gate[g + DENOMINATOR])
        else
            drained = floor(drained * (1 - 1e-15))
        end
        if drained > known then
            -- `known` became empty on the way: the rest of the time drains `own`, at the share.
            own = max(own - multiply_divide(drained - known, n, d), 0)
            known = drained
        end
        known = known - drained
        ledger[1] = (known > 0 or own > 0) and last + elapsed or at
        ledger[2], ledger[3] = known, own
        return known, own
    elseif kind <= COUNTER then
        local window = gate[g + WINDOW]
        local number = floor(at / window)
        if number > ledger[1] then
            local fades = kind == COUNTER and number == ledger[1] + 1
            ledger[4], ledger[5] = fades and ledger[2] or 0, fades and ledger[3] or 0
            ledger[1], ledger[2], ledger[3] = number, 0, 0
        end
        if ledger[4] == 0 and ledger[5] == 0 then
            return ledger[2], ledger[3]
        end
        local left = min((ledger[1] + 1) * window - at, window)
        local known, rest = multiply_divide(left, ledger[4], window)
        local own, own_rest = multiply_divide(left, ledger[5], window)
        return ledger[2] + known + (rest > 0 and 1 or 0), ledger[3] + own + (own_rest > 0 and 1 or 0)
    end
    local known, own, kept = 0, 0, 0
    for i = 1, #ledger, 3 do
        local leaves, a, b = ledger[i], ledger[i + 1], ledger[i + 2]
        if leaves > at then
            ledger[kept + 1], ledger[kept + 2], ledger[kept + 3] = leaves, a, b
            known, own, kept = known + a, own + b, kept + 3
        end
    end
    for i = #ledger, kept + 1, -1 do
        ledger[i] = nil
    end
    return known, own
end

-- Return when an entry of this time leaves the window of a log.
local function leaves_at(gate, g, at)
    local part = math.ceil(gate[g + WINDOW] / 64)
    return math.ceil((at + gate[g + WINDOW]) / part) * part
end

-- Add units to a ledger that was brought to this time.
local function put(gate, g, ledger, at, known, own)
    if gate[g] < LOG then
        ledger[2], ledger[3] = min(ledger[2] + known, LEVEL_MAX), min(ledger[3] + own, LEVEL_MAX)
    else
        local leaves, last = leaves_at(gate, g, at), #ledger - 2
        if last > 0 and ledger[last] >= leaves then
            ledger[last + 1], ledger[last + 2] = ledger[last + 1] + known, ledger[last + 2] + own
        else
            ledger[last + 3], ledger[last + 4], ledger[last + 5] = leaves, known, own
        end
    end
end

-- Return the units that a limit has room for; negative if it is above the share. A region with nothing
-- but accepted units may admit one request of an eventual limit, whatever its share is.
local function room_of(gate, g, known, own, n, d, cost)
    local left = gate[g + CAPACITY] * MICROS_PER_UNIT - known
    if gate[MODE] == EXACT or n == d then -- if no other region asks, rounding down loses nothing
        local part, rest = multiply_divide(left < 0 and -left or left, n, d)
        if left < 0 then
            part = rest > 0 and -part - 1 or -part
        end
        return floor((part - own) / MICROS_PER_UNIT)
    end
    -- Rounds up to a whole unit: otherwise a small limit would be lost between the regions.
    local part, rest = multiply_divide(left < 0 and -left or left, n, d * MICROS_PER_UNIT)
    if left < 0 then
        part = -part
    elseif rest > 0 then
        part = part + 1
    end
    if own == 0 and cost * MICROS_PER_UNIT <= left then
        return max(part, cost)
    end
    return floor((part * MICROS_PER_UNIT - own) / MICROS_PER_UNIT)
end

-- Units are counted in slots of time: the number of the current slot, its units, and those of the one
-- before, which fade. Return the slots with more units.
local function slots_with(number, current, before, slot, units)
    local new = floor(now / slot)
    if new > number then
        return new, units, new == number + 1 and current or 0
    end
    return number, current + units, before
end

-- Return the ledger at a place of a packed state, and the place after it.
local function ledger_at(raw, p, kind)
    local a, b, c, d, e
    if kind <= LEAKY then
        a, b, c, p = struct.unpack('>I7I7I7', raw, p)
        return {a, b, c}, p
    elseif kind <= COUNTER then
        a, b, c, d, e, p = struct.unpack('>I7I7I7I7I7', raw, p)
        return {a, b, c, d, e}, p
    end
    a, p = struct.unpack('>I2', raw, p)
    local ledger = {struct.unpack('>' .. string.rep('I7', a), raw, p)}
    p, ledger[a + 1] = ledger[a + 1], nil
    return ledger, p
end

local function packed_ledger(ledger, kind)
    if kind <= LEAKY then
        return struct.pack('>I7I7I7', ledger[1], ledger[2], ledger[3])
    elseif kind <= COUNTER then
        return struct.pack('>I7I7I7I7I7', unpack(ledger))
    end
    return struct.pack('>I2' .. string.rep('I7', #ledger), #ledger, unpack(ledger))
end

-- Return when a state expires, and in how many milliseconds if that is to be set. It expires when its levels
-- are empty, plus the longest window and 10 s, or up to an eighth later: so the expiry is set occasionally.
-- `before` is the number of elements before the ledgers.
local function expiry(gate, ledgers, before, n, d, ends, expires)
    local i = before
    for g = GATE_FIRST, #gate, GATE_STEP do
        i = i + 1
        local ledger = ledgers[i]
        if gate[g] <= LEAKY then
            local level = ledger[2] + ledger[3] / max(n, 1) * d
            ends = max(ends, ledger[1] + level / gate[g + NUMERATOR] * gate[g + DENOMINATOR])
        elseif gate[g] <= COUNTER then
            ends = max(ends, (ledger[1] + 2) * gate[g + WINDOW])
        else
            ends = max(ends, ledger[#ledger - 2] or 0)
        end
    end
    local need_ms = floor((max(ends - now, 0) + gate[LONGEST]) / 1000) + 10001
    local now_ms = floor(now / 1000)
    if expires - now_ms >= need_ms then
        return expires
    end
    -- A test's clock may stand still while the server's runs, so then it is an hour.
    need_ms = min(max(need_ms + floor(need_ms / 8), given and 3600000 or 0), 3155760000000)
    return now_ms + need_ms, need_ms
end

local function write(key, packed, in_ms)
    if in_ms then
        call('SET', key, packed, 'PX', in_ms)
    else
        call('SET', key, packed, 'KEEPTTL')
    end
end

-- Note that the totals of a subject are to be reported. Return DUE of its state.
local function now_due(key, due)
    -- Once more after a second: a server without memory may have evicted the set.
    if due > 0 and due <= now and now - due < REPEAT_US then
        return due
    end
    call('ZADD', KEYS[1], 'LT', now, string.sub(key, #KEYS[1] - 2))
    return now
end
