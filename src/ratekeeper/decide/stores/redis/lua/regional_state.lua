-- States as tables: for scripts that use all of a state, and for a check after a change.
--
-- The elements of a state's table are named here. They are in the order of the packed state, but for the
-- ledgers, which are its last ones. GATE is without its length. `shares` is a table as well.

local STATE_EPOCH, SHARE, GATE, TOTAL, PART, DUE, EXPIRES, GRANT_ENDS, DEMAND = 2, 3, 5, 6, 7, 10, 11, 12, 13
local GENERATION, ACCEPTED, GRANTED, DEMANDS, RETURNED, SEEN, LEDGERS = 16, 17, 18, 19, 20, 21, 21
local EPOCH, SHARE_NOW, TOKEN, BEFORE, CHANGED = 2, 3, 5, 6, 8
local SEEN_NAME, SEEN_GENERATION, SEEN_TOTAL, SEEN_AT, SEEN_DEMAND, SEEN_PART, SEEN_STEP = 1, 2, 3, 4, 5, 6, 6

--@ regional_demand

local shares = packed_shares and {struct.unpack('>BI7I3I3I7I3I3I7', packed_shares)}

local function levels(gate, g, ledger, n, d)
    return bring(gate, g, {unpack(ledger)}, now, n, d)
end

-- Add units that are learnt or admitted at a time.
local function add(gate, g, ledger, at, n, d, known, own)
    if known == 0 and own == 0 and (gate[g] <= LEAKY or gate[g] == LOG) then
        return -- each change rounds the drain of a bucket down to a millionth
    end
    bring(gate, g, ledger, at, n, d)
    put(gate, g, ledger, at, known, own)
end

-- Return the share that the subject uses now, as two numbers.
local function share_of(state, gate)
    if gate[MODE] == EXACT then
        return share_n, share_d
    end
    return share_by_demand(state[DEMANDS], unpack(state, DEMAND, DEMAND + 2))
end

local function empty_ledger(kind)
    return kind == LOG and {} or kind <= LEAKY and {0, 0, 0} or {0, 0, 0, 0, 0}
end

local function unpacked(raw)
    local state = {struct.unpack('>BI7I3I3I2c0I7I6I6I6I7I6I7I5I6I6', raw)}
    local p = state[GENERATION]
    local gate, ledgers = {cmsgpack.unpack_limit(state[GATE], 1000, 0)}, {}
    for g = GATE_FIRST, #gate, GATE_STEP do
        ledgers[#ledgers + 1], p = ledger_at(raw, p, gate[g])
    end
    state[GENERATION], state[ACCEPTED], state[GRANTED], state[DEMANDS], state[RETURNED], state[SEEN] =
        struct.unpack('>I7I7I5I2c0I2c0I2c0', raw, p)
    for i = 1, #ledgers do
        state[LEDGERS + i] = ledgers[i]
    end
    return state, gate
end

local function packed(state, gate)
    local limits, ledgers, p = state[GATE], {}, LEDGERS
    for g = GATE_FIRST, #gate, GATE_STEP do
        p = p + 1
        ledgers[#ledgers + 1] = packed_ledger(state[p], gate[g])
    end
    local version, epoch, n, d = unpack(state, 1, SHARE + 1)
    local demands, returned, seen = unpack(state, DEMANDS, SEEN)
    return struct.pack('>BI7I3I3I2c0', version, epoch, n, d, #limits, limits)
        .. struct.pack('>I7I6I6I6I7I6I7I5I6I6', unpack(state, TOTAL, DEMAND + 2))
        .. table.concat(ledgers)
        .. struct.pack('>I7I7I5', unpack(state, GENERATION, GRANTED))
        .. struct.pack('>I2c0I2c0I2c0', #demands, demands, #returned, returned, #seen, seen)
end

local function save(key, state, gate, n, d)
    local expires, in_ms = expiry(gate, state, LEDGERS, n, d, state[GRANT_ENDS], state[EXPIRES])
    state[EXPIRES] = expires
    write(key, packed(state, gate), in_ms)
end

-- A share that rose counts before anything else: until then, the levels drained at the lower one. Return
-- True if the share is another one.
local function raise_share(state, gate)
    local n, d, before, parts = share_n, share_d, state[SHARE], state[SHARE + 1]
    if state[STATE_EPOCH] == shares[EPOCH] and before * d == n * parts then
        return false
    end
    if state[STATE_EPOCH] ~= shares[EPOCH] and shares[BEFORE] * parts < before * shares[BEFORE + 1] then
        before, parts = shares[BEFORE], shares[BEFORE + 1] -- its share was lower in between
    end
    local rise = n * parts - before * d
    if rise > 0 and gate[MODE] == EXACT then -- a share that rose gives no units at once
        for i = 1, #state - LEDGERS do
            local g = GATE_FIRST + (i - 1) * GATE_STEP
            local micros = gate[g + CAPACITY] * MICROS_PER_UNIT
            local taken, rest = multiply_divide(micros, rise, n * parts)
            taken = taken + (rest > 0 and 1 or 0)
            add(gate, g, state[LEDGERS + i], shares[CHANGED], before, parts, taken, 0)
        end
    end
    state[SHARE], state[SHARE + 1], state[STATE_EPOCH] = n, d, shares[EPOCH]
    return true
end

-- Return the state of a subject, its gate, and whether it is to be written in any case; or nothing and the
-- reason why it cannot be read. With `limits`, a state that is absent is made; if `own` is true, its limits
-- are used.
local function opened(key, limits, own)
    local raw, state, gate, changed = fetched[2]
    fetched[2] = nil
    raw = raw or redis.pcall('GET', key) -- it is absent, of another type, or not the first
    if raw then
        local version = type(raw) == 'string' and string.byte(raw)
        if not version or version > 127 then
            return nil, 'it is not a state of Ratekeeper'
        elseif version ~= VERSION then
            return nil, 'its layout has the version ' .. version .. ' and this library knows ' .. VERSION
        end
        state, gate = unpacked(raw)
        if #state <= LEDGERS then
            return nil, 'it is damaged'
        end
    elseif not limits then
        return
    else
        gate = {cmsgpack.unpack_limit(limits, 1000, 2)}
        state = {VERSION, -1, shares[BEFORE], shares[BEFORE + 1], string.sub(limits, 3)}
        for p = TOTAL, GRANTED do
            state[p] = p == GENERATION and now or 0
        end
        state[DEMANDS], state[RETURNED], state[SEEN] = '', '', ''
        for g = GATE_FIRST, #gate, GATE_STEP do
            state[#state + 1] = empty_ledger(gate[g])
        end
    end
    changed = raise_share(state, gate) and raw
    if own and state[GATE] ~= string.sub(limits, 3) then -- the limits or the mode of the rule have changed
        local used = {cmsgpack.unpack_limit(limits, 1000, 2)}
        for i = 1, #state - LEDGERS do
            local g = GATE_FIRST + (i - 1) * GATE_STEP
            local kind, old = used[g], gate[g]
            if (kind <= LEAKY) ~= (old <= LEAKY) or (kind == LOG) ~= (old == LOG) then
                state[LEDGERS + i] = empty_ledger(kind) -- counts of another algorithm mean nothing
            end
        end
        gate, changed, state[GATE] = used, raw, string.sub(limits, 3)
    end
    return state, gate, changed
end
