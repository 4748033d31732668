-- Learn the reports of another region.
--
-- ARGV[2]  the name of that region
-- ARGV[3]  its epoch
-- ARGV     from the fourth on, for each state: the gate; and msgpack of the report: generation, total,
--          demand, part, its time, and of each limit the millionths returned and those that still
--          count in that region
--
-- The reply has two numbers for each report: 1 if its total is accepted, 0 if not, -1 if the state cannot
-- be read; and the units by which it has brought the subject above an eventual limit. It is empty if this
-- region has no share.

if not shares or share_n == 0 then
    return {}
end
local REGIONS_MAX, SILENT_US, REPORTED = 16, 10000000, 5
local region, epoch = ARGV[2], tonumber(ARGV[3])

local function excess_of(gate, g, ledger, n, d)
    local known, own = levels(gate, g, ledger, n, d)
    local capacity = gate[g + CAPACITY]
    -- Regions that are busy at the same time are over by so much for a moment.
    local usual = capacity + max(floor(capacity / 100), 5)
    return max(known + own - usual * MICROS_PER_UNIT, 0)
end

-- Return by how many windows a time is before the current one.
local function behind(gate, g, ledger, at)
    local window = gate[g + WINDOW]
    if gate[g] <= LEAKY or gate[g] == LOG then
        return 0
    end
    return max(floor(now / window), ledger[1]) - floor(at / window)
end

-- Return the place of a region that reports for the first time. If there are too many, it takes the place
-- of the one that was silent for the longest time.
local function new_place(all, step)
    if #all < REGIONS_MAX * step then
        return #all
    end
    local oldest = 0
    for p = step, #all - 1, step do
        if all[p + SEEN_AT] < all[oldest + SEEN_AT] then
            oldest = p
        end
    end
    return oldest
end

-- Add the units of a report to `known`, without those returned; return the excess.
local function learn_units(state, gate, all, p, report, n, d)
    local new, excess = max(report[2] - all[p + SEEN_TOTAL], 0) * MICROS_PER_UNIT, 0
    for i = 1, #state - LEDGERS do
        local g, ledger = GATE_FIRST + (i - 1) * GATE_STEP, state[LEDGERS + i]
        local r, l = p + SEEN_STEP + 2 * i - 1, p + SEEN_STEP + 2 * i
        local before = excess_of(gate, g, ledger, n, d)
        local returned, counts = report[REPORTED + 2 * i - 1], report[REPORTED + 2 * i]
        local added, left = min(new, counts), certainly_left(gate, g, all[l], all[p + SEEN_AT])
        -- A unit that does not count any more may be one of those that were returned.
        local back = max(returned - all[r], 0)
        back = min(max(back - (new - added), 0), left)
        give_back(gate, g, ledger, n, d, back, 0)
        local late = behind(gate, g, ledger, report[5])
        add(gate, g, ledger, now, n, d, late > 0 and 0 or added, 0)
        if late == 1 and gate[g] == COUNTER then
            ledger[4] = min(ledger[4] + added, LEVEL_MAX)
        end
        all[r], all[l] = max(returned, all[r]), left + (late > 0 and 0 or added) - back
        excess = max(excess, excess_of(gate, g, ledger, n, d) - before)
    end
    return math.ceil(excess / MICROS_PER_UNIT)
end

-- Keep what other regions have reported, and separately what a check needs of it.
local function keep_seen(state, all, step)
    local demands = ''
    for p = 0, #all - 1, step do
        local demand, name = all[p + SEEN_DEMAND], ' ' .. all[p + SEEN_NAME] .. ' '
        if demand > 0 then
            demands = demands .. struct.pack('>I7I6Bc0', all[p + SEEN_AT], demand, #name, name)
        end
    end
    state[SEEN], state[DEMANDS] = cmsgpack.pack(all), demands
end

local function learn(key, packed, report)
    local state, gate = opened(key, packed, false)
    if not state then
        return -1, 0
    end
    local n, d = share_of(state, gate)
    if #report ~= REPORTED + 2 * (#state - LEDGERS) then
        return 0, 0 -- it is not of this rule: two rules have one number
    end
    local all, p, step = seen_of(state, region)
    local exact, fits, early = gate[MODE] == EXACT, true, false
    for i = 1, #state - LEDGERS do
        local late = behind(gate, GATE_FIRST + (i - 1) * GATE_STEP, state[LEDGERS + i], report[5])
        fits, early = fits and late == 0, early or late < 0
    end
    local silent = p and now - all[p + SEEN_AT]
    local older = p and report[1] < all[p + SEEN_GENERATION] and silent >= 0 and silent <= SILENT_US
    if older or exact and early then
        save(key, state, gate, n, d)
        return 0, 0
    end
    if not p or all[p + SEEN_GENERATION] ~= report[1] then
        p = p or new_place(all, step)
        for i = p + 1, p + step do
            all[i] = 0
        end
        all[p + SEEN_NAME], all[p + SEEN_GENERATION] = region, report[1]
    end
    local excess = learn_units(state, gate, all, p, report, n, d)
    if report[2] >= all[p + SEEN_TOTAL] then -- it is not a late one
        all[p + SEEN_DEMAND], all[p + SEEN_PART] = report[3], report[4]
    end
    all[p + SEEN_TOTAL], all[p + SEEN_AT] = max(report[2], all[p + SEEN_TOTAL]), now
    keep_seen(state, all, step)
    save(key, state, gate, n, d)
    if not exact then
        return 1, excess
    end
    for i = 1, #state - LEDGERS do
        local g = GATE_FIRST + (i - 1) * GATE_STEP
        local known, own = levels(gate, g, state[LEDGERS + i], n, d)
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
