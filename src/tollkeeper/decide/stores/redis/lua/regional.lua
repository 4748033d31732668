-- The beginning of the scripts of limits that several regions share. `arithmetic.lua` is before it, and
-- `decide/regional.py` is the specification: these scripts agree with it, call for call.
--
-- All keys of a call are in one slot:
--
-- KEYS[1]  the shares of this region: msgpack of VERSION, the leader's fencing token, epoch, share
--          (two numbers), lowest share of late (two numbers), when it rose, and the regions that are live
-- KEYS[2]  the subjects that are due: a sorted set by time. A member is the end of a state's key
-- KEYS     from the third on: the state of each subject, msgpack of an array, VERSION to LEDGERS
-- ARGV[1]  the time in microseconds; empty: the server's
--
-- A gate is msgpack of the mode (0: exact, 1: eventual) and six numbers for each limit, KIND to STEP. It
-- is part of the state, because a report needs it. RETURNED is empty or msgpack of two numbers for each
-- limit: the millionths returned, and those accepted by all other regions. SHARE is the share that the state
-- was last used with, as two numbers, and its epoch. DEMAND and PART have three numbers each: see
-- `add_to_slots`. SEEN is empty or msgpack of SEEN_STEP and twice as many elements as limits for each
-- other region: SEEN_NAME to SEEN_PART, and for each limit the millionths returned and those that
-- certainly counted at SEEN_AT. At last, each limit has the array `Ledger.numbers`, with times in
-- microseconds. A check unpacks neither RETURNED nor the SEEN of an exact limit.

local VERSION, EXACT, MICROS_PER_UNIT, DEMAND_US, PARTS = 1, 0, 1000000, 2000000, 1000
local GATE, GENERATION, TOTAL, ACCEPTED, RETURNED, SHARE = 2, 3, 4, 5, 6, 7
local DEMAND, PART, GRANTED, GRANT_ENDS, SEEN, LEDGERS = 10, 13, 16, 17, 18, 18
local TOKEN, EPOCH, SHARE_NOW, BEFORE, CHANGED, LIVE_FIRST = 2, 3, 4, 6, 8, 9
local SEEN_NAME, SEEN_GENERATION, SEEN_TOTAL, SEEN_AT, SEEN_DEMAND, SEEN_PART, SEEN_STEP = 1, 2, 3, 4, 5, 6, 6
-- The offsets of a limit's numbers in the gate, and its kinds: up to LEAKY it is a bucket.
local CAPACITY, NUMERATOR, DENOMINATOR, WINDOW, STEP = 1, 2, 3, 4, 5
local GATE_FIRST, GATE_STEP = 2, 6
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

local shares = call('GET', KEYS[1])
shares = shares and cmsgpack.unpack(shares)
if shares and not shares[LIVE_FIRST - 1] then
    shares = nil -- it has only a token
end

-- Return the levels of a limit, and the time up to which a bucket is drained.
local function levels(gate, g, ledger, at, n, d)
    local kind = gate[g]
    if kind <= LEAKY then
        local last, known, own = ledger[1], ledger[2], ledger[3]
        if known == 0 and own == 0 then
            return 0, 0, at
        end
        local elapsed = at - last
        if elapsed <= 0 then
            return known, own, last
        end
        elapsed = elapsed - fmod(elapsed, gate[g + STEP])
        -- Rounds down: neither a part of a step nor a part of a millionth can be spent.
        local drained = elapsed / gate[g + DENOMINATOR] * gate[g + NUMERATOR]
        if n > 0 and drained > 2 * (known + own / n * d) + 2 then
            return 0, 0, at
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
        return known, own, (known > 0 or own > 0) and last + elapsed or at
    elseif kind <= COUNTER then
        local window = gate[g + WINDOW]
        local number = max(floor(at / window), ledger[1])
        if number == ledger[1] then
            local left = min((number + 1) * window - at, window)
            local known, rest = multiply_divide(left, ledger[4], window)
            local own, own_rest = multiply_divide(left, ledger[5], window)
            return ledger[2] + known + (rest > 0 and 1 or 0), ledger[3] + own + (own_rest > 0 and 1 or 0)
        elseif number > ledger[1] + 1 or kind < COUNTER then
            return 0, 0
        end
        local left = (number + 1) * window - at
        local known, rest = multiply_divide(left, ledger[2], window)
        local own, own_rest = multiply_divide(left, ledger[3], window)
        return known + (rest > 0 and 1 or 0), own + (own_rest > 0 and 1 or 0)
    end
    local known, own = 0, 0
    for i = 1, #ledger, 3 do
        if ledger[i] > at then
            known, own = known + ledger[i + 1], own + ledger[i + 2]
        end
    end
    return known, own
end

-- Bring a ledger to a time: drain a bucket, begin a window, drop the groups of a log that have left.
local function bring(gate, g, ledger, at, n, d)
    local kind = gate[g]
    if kind <= LEAKY then
        ledger[2], ledger[3], ledger[1] = levels(gate, g, ledger, at, n, d)
    elseif kind <= COUNTER then
        local number = floor(at / gate[g + WINDOW])
        if number > ledger[1] then
            local fades = kind == COUNTER and number == ledger[1] + 1
            ledger[4], ledger[5] = fades and ledger[2] or 0, fades and ledger[3] or 0
            ledger[1], ledger[2], ledger[3] = number, 0, 0
        end
    else
        local kept = 0
        for i = 1, #ledger, 3 do
            local leaves, known, own = ledger[i], ledger[i + 1], ledger[i + 2]
            ledger[i], ledger[i + 1], ledger[i + 2] = nil, nil, nil
            if leaves > at then
                ledger[kept + 1], ledger[kept + 2], ledger[kept + 3] = leaves, known, own
                kept = kept + 3
            end
        end
    end
end

-- Return when an entry of this time leaves the window of a log.
local function leaves_at(gate, g, at)
    local part = math.ceil(gate[g + WINDOW] / 64)
    return math.ceil((at + gate[g + WINDOW]) / part) * part
end

-- Add units that are learnt or admitted at a time.
local function add(gate, g, ledger, at, n, d, known, own)
    if known == 0 and own == 0 and (gate[g] <= LEAKY or gate[g] == LOG) then
        return -- each change rounds the drain of a bucket down to a millionth
    end
    bring(gate, g, ledger, at, n, d)
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
    if gate[1] == EXACT or n == d then -- if no other region asks, rounding down loses nothing
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
-- before, which fade.
local function add_to_slots(state, p, slot, units)
    local number = floor(now / slot)
    if number > state[p] then
        state[p + 2] = number == state[p] + 1 and state[p + 1] or 0
        state[p], state[p + 1] = number, 0
    end
    state[p + 1] = state[p + 1] + units
end

-- Return the units of the last slot of time, rounded up.
local function sum_of_slots(state, p, slot)
    local number = max(floor(now / slot), state[p])
    if number > state[p] + 1 then
        return 0
    end
    local left = min((number + 1) * slot - now, slot)
    local faded, rest = multiply_divide(left, number > state[p] and state[p + 1] or state[p + 2], slot)
    return faded + (rest > 0 and 1 or 0) + (number > state[p] and 0 or state[p + 1])
end

-- Return the share that the subject uses now, as two numbers.
local function share_of(state, gate)
    if gate[1] == EXACT then
        return shares[SHARE_NOW], shares[SHARE_NOW + 1]
    elseif state[SEEN] == '' then
        return 1, 1
    end
    local all, others = cmsgpack.unpack(state[SEEN]), 0
    for p = 1, #all, SEEN_STEP + (#gate - 1) / GATE_STEP * 2 do
        -- A later time: the clock was set back.
        local left = DEMAND_US - (now - all[p + SEEN_AT - 1])
        if left > 0 and left <= DEMAND_US then
            for i = LIVE_FIRST, #shares do
                if shares[i] == all[p] then
                    local faded, rest = multiply_divide(left, all[p + SEEN_DEMAND - 1], DEMAND_US)
                    others = others + faded + (rest > 0 and 1 or 0)
                end
            end
        end
    end
    if others == 0 then
        return 1, 1
    end
    local own = sum_of_slots(state, DEMAND, DEMAND_US)
    local part, rest = multiply_divide(PARTS, own, own + others)
    return max(part + (rest > 0 and 1 or 0), 1), PARTS
end

local function empty_ledger(kind)
    return kind == LOG and {} or kind <= LEAKY and {0, 0, 0} or {0, 0, 0, 0, 0}
end

-- Return the state of a subject, its gate, and whether it is to be written in any case; or nothing and the
-- reason why it cannot be read. With `packed`, a state that is absent is made; if `own` is true, its limits
-- are used.
local function opened(key, packed, own)
    local raw = redis.pcall('GET', key)
    local state, gate, changed
    if raw then
        local done
        done, state = pcall(cmsgpack.unpack, type(raw) == 'string' and raw or '')
        if not done or type(state) ~= 'table' or type(state[1]) ~= 'number' then
            return nil, 'it is not a state of Tollkeeper'
        elseif state[1] ~= VERSION then
            return nil, 'its layout has the version ' .. state[1] .. ' and this library knows ' .. VERSION
        elseif type(state[GATE]) ~= 'string' or #state <= LEDGERS then
            return nil, 'it is damaged'
        end
        gate = cmsgpack.unpack(state[GATE])
    elseif not packed then
        return
    else
        gate = cmsgpack.unpack(packed)
        local n, d = shares[BEFORE], shares[BEFORE + 1]
        state = {VERSION, packed, now, 0, 0, '', n, d, -1, 0, 0, 0, 0, 0, 0, 0, 0, ''}
        for g = GATE_FIRST, #gate, GATE_STEP do
            state[#state + 1] = empty_ledger(gate[g])
        end
    end
    -- A share that rose counts before anything else: until then, the levels drained at the lower one.
    local n, d, before, parts = shares[SHARE_NOW], shares[SHARE_NOW + 1], state[SHARE], state[SHARE + 1]
    if state[SHARE + 2] ~= shares[EPOCH] or before * d ~= n * parts then
        changed = raw
        if state[SHARE + 2] ~= shares[EPOCH] and shares[BEFORE] * parts < before * shares[BEFORE + 1] then
            before, parts = shares[BEFORE], shares[BEFORE + 1] -- its share was lower in between
        end
        local rise = n * parts - before * d
        if rise > 0 and gate[1] == EXACT then -- a share that rose gives no units at once
            for i = 1, #state - LEDGERS do
                local g = GATE_FIRST + (i - 1) * GATE_STEP
                local micros = gate[g + CAPACITY] * MICROS_PER_UNIT
                local taken, rest = multiply_divide(micros, rise, n * parts)
                taken = taken + (rest > 0 and 1 or 0)
                add(gate, g, state[LEDGERS + i], shares[CHANGED], before, parts, taken, 0)
            end
        end
        state[SHARE], state[SHARE + 1], state[SHARE + 2] = n, d, shares[EPOCH]
    end
    if own and state[GATE] ~= packed then -- the limits or the mode of the rule have changed
        local used = cmsgpack.unpack(packed)
        for i = 1, #state - LEDGERS do
            local kind = used[GATE_FIRST + (i - 1) * GATE_STEP]
            local old = gate[GATE_FIRST + (i - 1) * GATE_STEP]
            if (kind <= LEAKY) ~= (old <= LEAKY) or (kind == LOG) ~= (old == LOG) then
                state[LEDGERS + i] = empty_ledger(kind) -- counts of another algorithm mean nothing
            end
        end
        gate, changed, state[GATE] = used, raw, packed
    end
    return state, gate, changed
end

local function longest_window(gate)
    local window = gate[GATE_FIRST + WINDOW]
    for g = GATE_FIRST + GATE_STEP, #gate, GATE_STEP do
        window = max(window, gate[g + WINDOW])
    end
    return window
end

-- Write a state. It expires when its levels are empty, plus the longest window and 10 s.
local function save(key, state, gate, n, d)
    local ends = state[GRANT_ENDS]
    for i = 1, #state - LEDGERS do
        local g, ledger = GATE_FIRST + (i - 1) * GATE_STEP, state[LEDGERS + i]
        if gate[g] <= LEAKY then
            local level = ledger[2] + ledger[3] / max(n, 1) * d
            ends = max(ends, ledger[1] + level / gate[g + NUMERATOR] * gate[g + DENOMINATOR])
        elseif gate[g] <= COUNTER then
            ends = max(ends, (ledger[1] + 2) * gate[g + WINDOW])
        else
            ends = max(ends, ledger[#ledger - 2] or 0)
        end
    end
    local need = max(ends - now, 0) + longest_window(gate) + 10000000
    -- A test's clock may stand still while the server's runs, so then it is an hour.
    local need_ms = min(max(math.ceil(need / 1000), given and 3600000 or 0), 3155760000000)
    call('SET', key, cmsgpack.pack(state), 'PX', need_ms)
end

-- Note that the totals of a subject are to be reported.
local function now_due(key)
    call('ZADD', KEYS[2], 'LT', now, string.sub(key, #KEYS[2] - 2))
end
