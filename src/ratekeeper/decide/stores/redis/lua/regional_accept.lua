-- Move own units that all other regions have accepted to `known`.
--
-- ARGV[2]  the epoch
-- ARGV[3]  the leader's fencing token
-- ARGV     from the fourth on, for each state: msgpack of the generation, the total, 1 if all regions have
--          learnt it and 0 if some were not live, and of each limit the millionths returned
--
-- The reply is the number of states that were changed, in an array.

if not shares or tonumber(ARGV[3]) < shares[TOKEN] or tonumber(ARGV[2]) ~= shares[EPOCH] then
    return {0}
end
local MISSED_US = 10000000

-- Move own units, all but the last so many that were added.
local function move(gate, g, ledger, n, d, last)
    bring(gate, g, ledger, now, n, d)
    if gate[g] < LOG then
        local moved = max(ledger[3] - last, 0)
        ledger[2], ledger[3] = ledger[2] + moved, ledger[3] - moved
    else
        for i = #ledger - 2, 1, -3 do
            local kept = min(ledger[i + 2], last)
            last = last - kept
            ledger[i + 1], ledger[i + 2] = ledger[i + 1] + ledger[i + 2] - kept, kept
        end
    end
end

local function accept(key, accepted)
    local state, gate = opened(key)
    if not state or state[GENERATION] ~= accepted[1] then
        return 0
    end
    local n, d = share_of(state, gate)
    local total = min(accepted[2], state[TOTAL]) -- less, if the store has lost the last ones
    if total > state[ACCEPTED] then
        state[ACCEPTED] = total
        for i = 1, #state - LEDGERS do
            local g = GATE_FIRST + (i - 1) * GATE_STEP
            move(gate, g, state[LEDGERS + i], n, d, (state[TOTAL] - total) * MICROS_PER_UNIT)
        end
    end
    local all = state[ACCEPTED] == state[TOTAL]
    if state[RETURNED] ~= '' then
        local returned = returned_of(state)
        for i = 1, #state - LEDGERS do
            local r = 2 * i
            returned[r] = max(returned[r], min(accepted[3 + i], returned[r - 1]))
            all = all and returned[r] == returned[r - 1]
        end
        state[RETURNED] = cmsgpack.pack(returned)
    end
    local member = string.sub(key, #KEYS[1] - 2)
    if all and accepted[3] == 1 then
        call('ZREM', KEYS[1], member)
    elseif all then
        call('ZADD', KEYS[1], now + MISSED_US, member)
    end
    state[DUE] = all and 0 or state[DUE]
    save(key, state, gate, n, d)
    return 1
end

local changed = 0
for i = 3, #KEYS do
    local done, count = pcall(accept, KEYS[i], cmsgpack.unpack(ARGV[i + 1]))
    changed = changed + (done and count or 0)
end
return {changed}
