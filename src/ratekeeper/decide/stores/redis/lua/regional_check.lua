-- Decide one request by all limits of a global rule: every limit has room, or none is charged.
--
-- KEYS[3]  the state of the subject
-- ARGV[2]  the gate
-- ARGV[3]  the cost in units
-- ARGV[4]  'look': decide, but spend nothing
--
-- The client computes the decision from the ledgers after the check. The reply is an array: the time, or
-- -1 - the time when denied; the share, as two numbers; the granted units that are left; and the numbers of
-- the ledger, or an array for each of several ledgers.
-- It is empty if the region has no share, and has one text if the state cannot be read.

-- Where the demand begins, after the gate; the granted units and the demands of others, after the ledgers.
local DEMAND_AT, GRANTED_AT, DEMANDS_AT = 45, 14, 19

if share_n == 0 then
    return {}
end
local limits, cost, spend = ARGV[2], tonumber(ARGV[3]), ARGV[4] ~= 'look'
local raw, changed = fetched[2], false
local head = string.sub(packed_shares, 1, SHARE_BYTES) .. limits
if not raw or string.sub(raw, 1, #head) ~= head then
    -- There is no state, or the share or the limits have changed.
    --@ regional_state
    local state, gate
    state, gate, changed = opened(KEYS[3], limits, true)
    if not state then
        return {gate}
    end
    raw = packed(state, gate)
end

local gate = {cmsgpack.unpack_limit(limits, 1000, 2)}
local total, part, part_units, part_before, due, expires, grant_ends, slot, asked, asked_before, first =
    struct.unpack('>I7I6I6I6I7I6I7I5I6I6', raw, #head + 1)
local eventual, ledgers, tail = gate[MODE] ~= EXACT, {}, first
for g = GATE_FIRST, #gate, GATE_STEP do
    ledgers[#ledgers + 1], tail = ledger_at(raw, tail, gate[g])
end
local granted = now < grant_ends and struct.unpack('>I5', raw, tail + GRANTED_AT) or 0
local n, d = share_n, share_d
if eventual then
    n, d = 1, 1
end
local fits = true -- whether the cost can ever fit
for g = GATE_FIRST, #gate, GATE_STEP do
    fits = fits and (cost - granted) * d <= n * gate[g + CAPACITY]
end
if eventual then
    --@ regional_demand
    if spend and fits then
        slot, asked, asked_before = slots_with(slot, asked, asked_before, DEMAND_US, cost)
    end
    n, d = share_by_demand(struct.unpack('>I2c0', raw, tail + DEMANDS_AT), slot, asked, asked_before)
end
local room, need = math.huge, max(cost - granted, 0)
for i = 1, #ledgers do
    local g = GATE_FIRST + (i - 1) * GATE_STEP
    local known, own = bring(gate, g, ledgers[i], now, n, d)
    room = min(room, room_of(gate, g, known, own, n, d, need))
end
local short = max(cost - max(room, 0), 0)
local allowed = fits and short <= granted
local charges = spend and cost > 0 and fits
local units = charges and allowed and cost - short or 0 -- units of a grant are not charged
local charged = charges and allowed
if units > 0 then
    for i = 1, #ledgers do
        put(gate, GATE_FIRST + (i - 1) * GATE_STEP, ledgers[i], now, 0, units * MICROS_PER_UNIT)
    end
else -- each change rounds the drain of a bucket down to a millionth, so they are as before
    local p, before = first, nil
    for i = 1, #ledgers do
        local kind = gate[GATE_FIRST + (i - 1) * GATE_STEP]
        before, p = ledger_at(raw, p, kind)
        if not charged or kind <= LEAKY or kind == LOG then
            ledgers[i] = before
        end
    end
end
local rest = string.sub(raw, tail)
if charged then
    total, granted = total + units, granted - short
    part, part_units, part_before = slots_with(part, part_units, part_before, gate[LONGEST], units)
    if grant_ends > 0 then
        rest = string.sub(rest, 1, GRANTED_AT) .. struct.pack('>I5', granted) .. string.sub(rest, DEMANDS_AT + 1)
    end
end
charges = charges and (allowed or eventual)
local noted = due
if charges then
    due = now_due(KEYS[3], due)
end
if charges and not allowed and due == noted and fetched[2] then
    -- Only the demand has changed. The expiry is late enough, because the levels have not.
    call('SETRANGE', KEYS[3], #head + DEMAND_AT, struct.pack('>I5I6I6', slot, asked, asked_before))
elseif charges or changed then
    local in_ms, packed
    expires, in_ms = expiry(gate, ledgers, 0, n, d, grant_ends, expires)
    local numbers = struct.pack(
        '>I7I6I6I6I7I6I7I5I6I6', total, part, part_units, part_before, due, expires, grant_ends, slot, asked, asked_before
    )
    packed = packed_ledger(ledgers[1], gate[GATE_FIRST])
    for i = 2, #ledgers do
        packed = packed .. packed_ledger(ledgers[i], gate[GATE_FIRST + (i - 1) * GATE_STEP])
    end
    write(KEYS[3], head .. numbers .. packed .. rest, in_ms)
end
local verdict = allowed and now or -1 - now
if #ledgers > 1 then
    return {verdict, n, d, granted, unpack(ledgers)}
end
return {verdict, n, d, granted, unpack(ledgers[1])}
