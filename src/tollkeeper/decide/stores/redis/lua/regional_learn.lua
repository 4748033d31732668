-- Learn the reports of another region.
--
-- ARGV[2]  the name of that region
-- ARGV[3]  its epoch
-- ARGV     from the fourth on, for each state: the gate; and msgpack of the report: generation, total,
--          demand, part, its time, and of each limit the units returned and the millionths that still
--          count in that region
--
-- The reply has two numbers for each report: 1 if its total is accepted, 0 if not, -1 if the state cannot
-- be read; and the units by which it has brought the subject above an eventual limit. It is empty if this
-- region has no share.

if not shares or shares[SHARE_NOW] == 0 then
    return {}
end
local REGIONS_MAX, SILENT_US, REPORTED = 16, 10000000, 5
local region, epoch = ARGV[2], tonumber(ARGV[3])

local function excess_of(gate, g, ledger, n, d)
    local known, own = levels(gate, g, ledger, now, n, d)
    return max(known + own - gate[g + CAPACITY] * MICROS_PER_UNIT, 0)
end

-- Return by how many windows a time is before the current one.
local function behind(gate, g, ledger, at)
    local window = gate[g + WINDOW]
    if gate[g] <= LEAKY or gate[g] == LOG then
        return 0
    end
    return max(floor(now / window), ledger[1]) - floor(at / window)
end

-- Make room for a region: the one that was silent for the longest time goes.
local function make_room(all)
    local count, oldest = 0, nil
    for name, each in pairs(all) do
        count = count + 1
        if not oldest or each[SEEN_AT] < all[oldest][SEEN_AT] then
            oldest = name
        end
    end
    if count >= REGIONS_MAX then
        all[oldest] = nil
    end
end

-- Add the units of a report to `known`, without those returned; return the excess.
local function learn_units(state, gate, seen, report, n, d)
    local new, excess = max(report[2] - seen[SEEN_TOTAL], 0) * MICROS_PER_UNIT, 0
    for i, ledger in ipairs(state[LEDGERS]) do
        local g = GATE_FIRST + (i - 1) * GATE_STEP
        local before = excess_of(gate, g, ledger, n, d)
        local returned, counts = report[REPORTED + 2 * i - 1], report[REPORTED + 2 * i]
        local added, left = min(new, counts), certainly_left(gate, g, seen[SEEN_LEFT][i], seen[SEEN_AT])
        local back = max(returned - seen[SEEN_RETURNED][i], 0) * MICROS_PER_UNIT
        -- A unit that does not count any more may be one of those that were returned.
        back = min(max(back - (new - added), 0), left)
        give_back(gate, g, ledger, n, d, back, 0)
        local late = behind(gate, g, ledger, report[5])
        add(gate, g, ledger, now, n, d, late > 0 and 0 or added, 0)
        if late == 1 and gate[g] == COUNTER then
            ledger[4] = min(ledger[4] + added, LEVEL_MAX)
        end
        seen[SEEN_LEFT][i] = left + (late > 0 and 0 or added) - back
        seen[SEEN_RETURNED][i] = max(returned, seen[SEEN_RETURNED][i])
        excess = max(excess, excess_of(gate, g, ledger, n, d) - before)
    end
    return math.ceil(excess / MICROS_PER_UNIT)
end

local function learn(key, packed, report)
    local state, gate = opened(key, packed, false)
    if not state then
        return -1, 0
    end
    local n, d = share_of(state, gate)
    local seen, exact, fits, early = state[SEEN][region], gate[1] == EXACT, true, false
    for i, ledger in ipairs(state[LEDGERS]) do
        local late = behind(gate, GATE_FIRST + (i - 1) * GATE_STEP, ledger, report[5])
        fits, early = fits and late == 0, early or late < 0
    end
    local older = seen and report[1] < seen[SEEN_GENERATION]
    if older and now >= seen[SEEN_AT] and now - seen[SEEN_AT] <= SILENT_US or exact and early then
        save(key, state, gate, n, d)
        return 0, 0
    end
    if not seen or seen[SEEN_GENERATION] ~= report[1] then
        if not seen then
            make_room(state[SEEN])
        end
        local count = #state[LEDGERS]
        seen = {report[1], 0, 0, 0, 0, zeros(count), zeros(count)}
        state[SEEN][region] = seen
    end
    local excess = learn_units(state, gate, seen, report, n, d)
    if report[2] >= seen[SEEN_TOTAL] then -- it is not a late one
        seen[SEEN_DEMAND], seen[SEEN_PART] = report[3], report[4]
    end
    seen[SEEN_TOTAL], seen[SEEN_AT] = max(report[2], seen[SEEN_TOTAL]), now
    save(key, state, gate, n, d)
    if not exact then
        return 1, excess
    end
    for i, ledger in ipairs(state[LEDGERS]) do
        local g = GATE_FIRST + (i - 1) * GATE_STEP
        local known, own = levels(gate, g, ledger, now, n, d)
        fits = fits and room_of(gate, g, known, own, n, d, 0) >= 0
    end
    return fits and epoch == shares[EPOCH] and 1 or 0, 0
end

local answers = {}
for i = 3, #KEYS do
    local a = 2 * i - 2
    local done, accepted, excess = pcall(learn, KEYS[i], ARGV[a], cmsgpack.unpack(ARGV[a + 1]))
    answers[#answers + 1], answers[#answers + 2] = done and accepted or -1, done and excess or 0
end
return answers
