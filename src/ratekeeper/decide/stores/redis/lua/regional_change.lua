-- Refund units, grant units, or reset the counts of one subject.
--
-- KEYS[3]  the state of the subject
-- ARGV[2]  the gate
-- ARGV[3]  'refund', 'grant' or 'reset'
-- ARGV[4]  refund, grant: the units
-- ARGV[5]  refund: the time at which they were charged, in microseconds; empty: not known
--          grant: for how many microseconds; empty: the longest window
-- ARGV[6]  grant: the most units that a grant can have
--
-- The reply is that of a check that finds no share or an unreadable state; otherwise 1 in an array.

local what, units, time = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
if not shares then
    return what == 'grant' and {} or {1}
end

-- Forget what counts. Totals stay: they only grow. Return False if the state is damaged.
local function reset()
    local state, gate = opened(KEYS[3])
    if not state then
        return not gate
    end
    state[GRANTED], state[PART], state[PART + 1], state[PART + 2] = 0, 0, 0, 0
    for i = 1, #state - LEDGERS do
        state[LEDGERS + i] = empty_ledger(gate[GATE_FIRST + (i - 1) * GATE_STEP])
    end
    local n, d = share_of(state, gate)
    save(KEYS[3], state, gate, n, d)
    return #returned_of(state) == 2 * (#state - LEDGERS) and type(seen_of(state)) == 'table'
end

if what == 'reset' then
    local done, whole = pcall(reset)
    if not (done and whole) then
        call('PEXPIRE', KEYS[3], 0) -- deletes it: nothing else can repair it
    end
    return {1}
end
local state, gate = opened(KEYS[3], what == 'grant' and ARGV[2] or nil, what == 'grant')
if not state then
    return {gate or 1}
end
local n, d = share_of(state, gate)

if what == 'refund' then
    local changed, returned = false, returned_of(state)
    for i = 1, #state - LEDGERS do
        local g, ledger = GATE_FIRST + (i - 1) * GATE_STEP, state[LEDGERS + i]
        local back = min(units * MICROS_PER_UNIT, state[TOTAL] * MICROS_PER_UNIT - returned[2 * i - 1])
        back = max(back, 0)
        if time and gate[g] == LOG then
            back = now - time < gate[g + WINDOW] and back or 0
        elseif time then
            back = certainly_left(gate, g, back, time)
        end
        local _, own = levels(gate, g, ledger, n, d)
        local first = min(own, back)
        give_back(gate, g, ledger, n, d, back - first, first, time)
        returned[2 * i - 1] = returned[2 * i - 1] + back
        changed = changed or back > 0
    end
    if not changed then
        return {1}
    end
    state[RETURNED] = cmsgpack.pack(returned)
    state[DUE] = now_due(KEYS[3], state[DUE])
else
    local left = now < state[GRANT_ENDS] and state[GRANTED] or 0
    state[GRANTED] = min(left + units, tonumber(ARGV[6]))
    state[GRANT_ENDS] = max(now + (time or gate[LONGEST]), state[GRANT_ENDS])
end
save(KEYS[3], state, gate, n, d)
return {1}
