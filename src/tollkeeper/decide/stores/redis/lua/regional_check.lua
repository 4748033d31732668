-- Decide one request by all limits of a global rule: every limit has room, or none is charged.
--
-- KEYS[3]  the state of the subject
-- ARGV[2]  the gate
-- ARGV[3]  the cost in units
-- ARGV[4]  'look': decide, but spend nothing
--
-- The client computes the decision from the ledgers after the check. The reply is an array: the time, or
-- -1 - the time when denied; the share, as two numbers; the granted units that are left; and the ledgers.
-- It is empty if the region has no share, and has one text if the state cannot be read.

if not shares or shares[SHARE_NOW] == 0 then
    return {}
end
local cost, spend = tonumber(ARGV[3]), ARGV[4] ~= 'look'
local state, gate, changed = opened(KEYS[3], ARGV[2], true)
if not state then
    return {gate}
end
local eventual = gate[1] ~= EXACT
local granted = now < state[GRANT_ENDS] and state[GRANTED] or 0
local fits = true -- whether the cost can ever fit
for g = GATE_FIRST, #gate, GATE_STEP do
    local capacity = gate[g + CAPACITY]
    if eventual then
        fits = fits and cost - granted <= capacity
    else
        fits = fits and (cost - granted) * shares[SHARE_NOW + 1] <= shares[SHARE_NOW] * capacity
    end
end
if spend and eventual and fits then
    add_to_slots(state, DEMAND, DEMAND_US, cost)
end
local n, d = share_of(state, gate)
local room, need = math.huge, max(cost - granted, 0)
for i = 1, #state - LEDGERS do
    local g = GATE_FIRST + (i - 1) * GATE_STEP
    local known, own = levels(gate, g, state[LEDGERS + i], now, n, d)
    room = min(room, room_of(gate, g, known, own, n, d, need))
end
local short = max(cost - max(room, 0), 0)
local allowed = fits and short <= granted
local charges = spend and cost > 0 and fits
if charges and allowed then
    granted = granted - short
    state[GRANTED] = granted
    local units = cost - short -- units of a grant are not charged
    for i = 1, #state - LEDGERS do
        local g = GATE_FIRST + (i - 1) * GATE_STEP
        add(gate, g, state[LEDGERS + i], now, n, d, 0, units * MICROS_PER_UNIT)
    end
    state[TOTAL] = state[TOTAL] + units
    add_to_slots(state, PART, longest_window(gate), units)
end
charges = charges and (allowed or eventual)
if charges or changed then
    save(KEYS[3], state, gate, n, d)
end
if charges then
    now_due(KEYS[3])
end
return {allowed and now or -1 - now, n, d, granted, unpack(state, LEDGERS + 1)}
