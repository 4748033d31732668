-- Return what is due. Without states: the subjects, and since when. With states: their reports.
--
-- ARGV[2]  the leader's fencing token
-- ARGV[3]  without states: the most subjects to return
--
-- The reply is an array. Without states: a subject and its time, for each. With states, for each: an
-- empty array if there is nothing to report; otherwise the gate, the generation, total, demand, part, the
-- time, and of each limit the millionths returned and those that count. A subject is due again in
-- REPEAT_US.

local MISSED_US = 10000000
if not shares or tonumber(ARGV[2]) < shares[TOKEN] then
    return {}
end
if #KEYS == 2 then
    local after = string.format('(%.0f', now + MISSED_US)
    local found = call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'WITHSCORES', 'LIMIT', 0, ARGV[3])
    -- Nothing is noted for so late a time, unless the clock was set back since.
    local late = call('ZRANGEBYSCORE', KEYS[1], after, '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[3])
    for i = 1, #late do
        found[#found + 1] = late[i]
    end
    return found
end

local function report(key)
    local member = string.sub(key, #KEYS[1] - 2)
    local state, gate = opened(key)
    if not state then
        call('ZREM', KEYS[1], member)
        return {}
    end
    local n, d = share_of(state, gate)
    local demand = sum_of_slots(state[DEMAND], state[DEMAND + 1], state[DEMAND + 2], DEMAND_US)
    local part = sum_of_slots(state[PART], state[PART + 1], state[PART + 2], gate[LONGEST])
    local found = {gate, state[GENERATION], state[TOTAL], demand, part, now}
    local returned = returned_of(state)
    local all, _, step = seen_of(state)
    for i = 1, #state - LEDGERS do
        local g = GATE_FIRST + (i - 1) * GATE_STEP
        local known, own = levels(gate, g, state[LEDGERS + i], n, d)
        if gate[MODE] ~= EXACT then
            for p = 0, #all - 1, step do
                known = known - certainly_left(gate, g, all[p + SEEN_STEP + 2 * i], all[p + SEEN_AT])
            end
            own = own + max(known, 0)
        end
        found[#found + 1], found[#found + 2] = returned[2 * i - 1], own
    end
    call('ZADD', KEYS[1], now + REPEAT_US, member)
    state[DUE] = 0
    save(key, state, gate, n, d)
    return found
end

local reports = {}
for i = 3, #KEYS do
    local done, found = pcall(report, KEYS[i])
    if not done then
        call('ZREM', KEYS[1], string.sub(KEYS[i], #KEYS[1] - 2))
    end
    reports[#reports + 1] = done and found or {}
end
return reports
