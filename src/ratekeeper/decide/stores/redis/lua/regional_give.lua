-- Take units off the levels of a limit, as far as they are there. A log takes units off that are not
-- newer than `charged`, the newest of them first; without a time, the oldest first.
local function give_back(gate, g, ledger, n, d, known, own, charged)
    if known == 0 and own == 0 then
        return -- as in `add`
    end
    bring(gate, g, ledger, now, n, d)
    if gate[g] < LOG then
        local known_left, own_left = max(known - ledger[2], 0), max(own - ledger[3], 0)
        ledger[2], ledger[3] = max(ledger[2] - known, 0), max(ledger[3] - own, 0)
        if gate[g] > LEAKY then
            ledger[4], ledger[5] = max(ledger[4] - known_left, 0), max(ledger[5] - own_left, 0)
        end
        return
    end
    local first, last, step = 1, #ledger - 2, 3
    if charged then
        local leaves = leaves_at(gate, g, charged)
        first, last, step = last, 1, -3
        while first > 0 and ledger[first] > leaves do
            first = first - 3
        end
    end
    for i = first, last, step do
        local was_known, was_own = ledger[i + 1], ledger[i + 2]
        ledger[i + 1], ledger[i + 2] = max(was_known - known, 0), max(was_own - own, 0)
        known, own = max(known - was_known, 0), max(own - was_own, 0)
    end
    local kept = 0
    for i = 1, #ledger, 3 do
        local leaves, a, b = ledger[i], ledger[i + 1], ledger[i + 2]
        ledger[i], ledger[i + 1], ledger[i + 2] = nil, nil, nil
        if a > 0 or b > 0 then
            ledger[kept + 1], ledger[kept + 2], ledger[kept + 3] = leaves, a, b
            kept = kept + 3
        end
    end
end
