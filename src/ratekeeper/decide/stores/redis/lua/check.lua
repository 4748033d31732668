-- Decide groups of charges, in order. All charges of a group have room, or none is made.
--
-- KEYS  see open.lua
-- ARGV  for each charge, the gate and the amount: cost + 2^31 * (1 if the charge is in the group of the
--       charge before + 2 if it is optional + 4 * (equal requests - 1)).
--       A last argument of its own: the time in microseconds, or empty for the server's; behind 'look'
--       if nothing is to be spent
--
-- The script decides whether to allow a request, and charges it. The client computes the other
-- fields of a decision (remaining units, time to retry) from the states before the check, with the
-- code that is the reference for every engine. So the reply to a charge is a flat array:
--
--     the time, or -1 - the time when denied; then for each limit
--     bucket, fixed   last, a                     last is -1 if there is no state
--     counter         last, a, b
--     log             last, number of live times, the time that must expire for the cost to fit
--     in flight       the five numbers of `look_at` in slots.lua
--
-- If any units are granted, each limit has two more numbers (units, end), and a log returns all its
-- live times instead of the one. If any units are leased, each limit has four more: the units and the
-- end of both groups of holds; they count as live times of a log. If any units are owed, each limit has
-- one more; a log that owes returns the numbers of its sequence (see rings.lua), or with a grant all its
-- times.
--
-- Of several equal requests, as many are admitted as have room, in one step. Their number is behind
-- the states. If it is above 0 the reply allows. The time of a log is that of the first request that
-- is denied.
--
-- A gate may have three more numbers: the units to lease with the check, twice the nodes, and the
-- microseconds that the lease lasts. Then the units and the end of the lease are last in the reply,
-- and for each log the time that must expire for the same cost to fit once more; 0 if it fits, or if
-- units are granted.
--
-- Or it has one more number: the stamp of a request, which takes a slot of limits of requests in flight.
--
-- A charge changes arrays and logs, which later charges of the call see. They are written after the
-- last charge of the group has passed, and dropped otherwise. The usual path, of one limit without
-- extras, calls neither `max` nor `min`, which take 0.05 us.

local look = #ARGV % 2 == 1 and string.sub(ARGV[#ARGV], 1, 4) == 'look'

--@ if logs
-- Return the time in a log that must expire for a cost to fit; 0 if it fits, or never does.
local function blocking(ring, extra, cost)
    local first, second, alive = 0, 0, size_of(ring) - ring.dead
    if ring.entry then
        local place = ring.length - ring.capacity + cost - 1
        return place >= 0 and cost <= ring.capacity and ring.entry(place) or 0
    end
    if extra then -- as if they were times after all others
        first = extra[4] > ring.oldest and extra[3] or 0
        second = extra[6] > ring.oldest and extra[5] or 0
    end
    local position = alive + first + second - ring.capacity + cost - 1
    if position < 0 or cost > ring.capacity then
        return 0
    elseif position < alive then
        return time_at(ring, ring.dead + position)
    end
    return position < alive + first and extra[4] or extra[6]
end
--@ end

-- Return the reply to a charge; if it passes, also the states to write.
local function decide(charge)
    local gate = {cmsgpack.unpack(ARGV[2 * charge - 1])}
    local last_g, cost, requests = #gate, tonumber(ARGV[2 * charge]), 1
    if cost >= AMOUNTS then
        requests, cost = floor(cost / AMOUNTS / 4) + 1, cost % AMOUNTS
    end
    local leases = false
--@ if leases
    leases = last_g % GATE_STEP == 4
    last_g = leases and last_g - 3 or last_g
--@ end
--@ if slots
    local stamp = last_g % GATE_STEP == 2 and gate[last_g] or 0
    last_g = last_g - (last_g - 1) % GATE_STEP
--@ end
    local key, held, logs, extras
    local strict = cost > 0 and not look
    --@ open
    local granted, holding, owing, saved, rooms = false, false, false, nil, nil
    if extras then
        saved, rooms = {unpack(held or {})}, {}
        for _, extra in pairs(extras) do
            live_holds(extra, 0)
            granted, holding = granted or extra[1] > 0, holding or extra[3] > 0
            owing = owing or extra[OWED] > 0
        end
    end
--@ if leases
    rooms = rooms or {}
    local rewound = false
--@ end

    local answer, size, admitted, p = {now, 0, 0}, 1, requests, HELD_FIRST
    for g = GATE_FIRST, last_g, GATE_STEP do
        local kind, capacity, window = gate[g + KIND], gate[g + CAPACITY], gate[g + WINDOW]
        local extra, last, a, at, room = extras and extras[g], nil, nil, nil, nil
        local owed = owing and extra and extra[OWED] or 0
        if kind < LOG then
            last, a = held[1] - held[p + 1], held[p + 2]
            answer[size + 1], answer[size + 2] = last, a
            size, at = size + 2, last > now and last or now
        end
        if kind == BUCKET and extra then
            a, at = level_of(gate, g, last, a, extra)
            room = floor((capacity * MICROS_PER_UNIT - a) / MICROS_PER_UNIT)
        elseif kind == BUCKET then
            -- A full bucket is as new: its next step counts from now.
            if a > capacity * MICROS_PER_UNIT then
                a = capacity * MICROS_PER_UNIT
            end
            local elapsed = now - last
            at = last
            if elapsed > 0 then
                elapsed = elapsed - elapsed % gate[g + STEP]
                at = last + elapsed
                if elapsed < gate[g + FULL] then
                    -- Rounded down: a part of a millionth that is not refilled yet cannot be spent.
                    a = a - multiply_divide(elapsed, gate[g + NUMERATOR], gate[g + DENOMINATOR])
                else
                    a = 0
                end
            end
            if a <= 0 then
                a, at = 0, last > now and last or now
            end
            room = floor((capacity * MICROS_PER_UNIT - a) / MICROS_PER_UNIT)
        elseif kind == FIXED then
            if owed > 0 then
                a = carry(gate, g, last, a, nil, owed, at)
            elseif last - last % window ~= at - at % window then
                a = 0
            end
            room = capacity - a
        elseif kind == COUNTER then
            local b = held[p + 3]
            size = size + 1
            answer[size] = b
            local windows = (at - at % window - last + last % window) / window
            if owed > 0 then
                a, b = carry(gate, g, last, a, b, owed, at)
            elseif windows > 0 then
                a, b = windows == 1 and b or 0, 0
            end
            -- Rounded up: a request of the previous window counts until it has faded out entirely.
            local faded, rest = multiply_divide(window - at % window, a, window)
            room = capacity - b - faded - (rest > 0 and 1 or 0)
            if cost > 0 then
                held[p + 3] = b
            end
        end
        if kind < LOG then
            if cost > 0 then
                held[p + 1], held[p + 2] = held[1] - at, a
            end
            p = p + (kind == COUNTER and 4 or 3)
--@ if slots
        elseif kind == FLIGHT then
            local taken, used, first, finish, own = look_at(logs[g], stamp)
            answer[size + 1], answer[size + 2], answer[size + 3] = taken, used, first
            answer[size + 4], answer[size + 5] = finish, own
            size = size + 5
            -- One slot, whatever the cost.
            room = (used < capacity or own > 0) and 9007199254740991 or 0
--@ end
--@ if logs
        else
            local ring = logs[g]
            last = ring.last
            ring.at = last > now and last or now
            ring.oldest = ring.at - window
            local alive, holds_after, newest = size_of(ring), ring.oldest, last
            if owed > 0 then
                extend(ring, extra, ring.at)
                ring.dead, holds_after = 0, ring.at
                room = ring.owed > 0 and 0 or capacity - ring.due + ring.gone
                newest = ring.entry((ring.owed > 0 and ring.length or max(ring.due, 1)) - 1)
            else
                ring.dead = dead_of(ring, ring.oldest)
                alive = alive - ring.dead
                room = capacity - alive
            end
            for group = 3, extra and 5 or 0, 2 do
                room = room - (extra[group + 1] > holds_after and extra[group] or 0)
            end
            answer[size + 1], answer[size + 2], answer[size + 3] = newest, capacity - room, 0
            if granted then
                answer[size + 1], answer[size + 2] = last, alive
                answer[size + 3] = times(ring, ring.dead, alive)
            end
            size = size + 3
            ring.place = size
--@ end
        end
        if room < 0 then
            room = 0
        end
        if rooms then
            rooms[g] = room
        end
--@ if leases
        rewound = rewound or last > now
--@ end
        if granted then
            answer[size + 1], answer[size + 2] = extra and extra[1] or 0, extra and extra[2] or 0
            size = size + 2
            room = room + (extra and now < extra[2] and extra[1] or 0)
        end
        for group = 3, holding and 6 or 0 do
            size = size + 1
            answer[size] = extra and extra[group] or 0
        end
        if owing then -- of a log without its times, as of now
            size = size + 1
            answer[size] = not granted and owed > 0 and kind == LOG and logs[g].owed or owed
        end
        if cost * admitted > room then
            admitted = floor(room / cost)
        end
    end

    local units, need = admitted * cost, nil
    local leased, lease_ends = 0, 0
--@ if leases
    if leases and units > 0 and not rewound then
        leased, lease_ends = gate[last_g + 1], now + gate[last_g + 3]
        for g = GATE_FIRST, last_g, GATE_STEP do
            local room, window = rooms[g], gate[g + WINDOW]
            leased = min(leased, floor((room - min(units, room)) / gate[last_g + 2]))
            if gate[g + KIND] == FIXED or gate[g + KIND] == COUNTER then
                lease_ends = min(lease_ends, now - now % window + window)
            end
        end
        if leased <= 0 or lease_ends - now < LEASE_MIN then
            leased, lease_ends = 0, 0
        else
            extras = extras or {}
            for g = GATE_FIRST, last_g, GATE_STEP do
                extras[g] = extras[g] or {0, 0, 0, 0, 0, 0, 0, 0}
            end
        end
    end
--@ end
    if units > 0 then
        need, p = now, HELD_FIRST
        for g = GATE_FIRST, last_g, GATE_STEP do
            local kind, window, extra, own = gate[g + KIND], gate[g + WINDOW], extras and extras[g], units
            local ring = logs and logs[g]
            if extra and rooms then
                -- A grant is used only for units that the limit itself has no room for.
                own = min(units, rooms[g])
                extra[1] = now < extra[2] and extra[1] - units + own or 0
            end
--@ if slots
            if kind == FLIGHT then
                take_slot(ring, stamp)
            end
--@ end
--@ if logs
            if ring and kind == LOG then
                if own > 0 then
                    if ring.entry then
                        enter(ring, extra, ring.at)
                    end
                    drop_oldest(ring, ring.dead)
                    ring.dead = 0
                    if extra then
                        append_ended(ring, extra, ring.at)
                        live_holds(extra, ring.at)
                    end
                    append(ring, ring.at, own)
                end
--@ if leases
                if leased > 0 then
                    add_hold(extra, leased, lease_ends)
                end
--@ end
                ring.need, ring.extra = ring.at + window, extra
                if extra then
                    local later_windows = ceil(extra[OWED] / gate[g + CAPACITY])
                    ring.need = needed_with(extra, ring.need + later_windows * window, window)
                end
            end
--@ end
            if not ring then
                if extra and own > 0 then -- it has room, so no debt is left
                    live_holds(extra, max(now, held[1] - held[p + 1]))
                    extra[OWED] = 0
                end
--@ if leases
                if leased > 0 then
                    add_hold(extra, leased, (held_until(gate, g, lease_ends)))
                    own = own + leased
                end
--@ end
                if own == 0 then -- as if the limit was not charged
                    for number = p + 1, p + (kind == COUNTER and 3 or 2) do
                        held[number] = saved[number]
                    end
                elseif kind == BUCKET then
                    held[p + 2] = held[p + 2] + own * MICROS_PER_UNIT
                elseif kind == FIXED then
                    held[p + 2] = held[p + 2] + own
                else
                    held[p + 3] = held[p + 3] + own
                end
                --@ needed
                need, p = until_then > need and until_then or need, p + (kind == COUNTER and 4 or 3)
            end
        end
        if extras and held then
            held = complete(gate, held, extras)
        end
        if fields and key then
            fields[gate[1]] = held
        end
    end
    if requests > 1 then
        size = size + 1
        answer[size] = admitted
    end
--@ if leases
    if leases then
        answer[size + 1], answer[size + 2] = leased, lease_ends
        size = size + 2
    end
--@ end
--@ if logs
    for g = GATE_FIRST, logs and last_g or 0, GATE_STEP do
        local ring = logs[g]
        if ring and gate[g + KIND] == LOG then
            local extra, found = extras and extras[g], 0
            if not granted and (leases or admitted < requests) then
                found = blocking(ring, extra, cost)
                if admitted < requests then
                    answer[ring.place] = found
                end
            end
--@ if leases
            if leases then
                size = size + 1
                answer[size] = admitted > 0 and leased < cost and found or 0
            end
--@ end
        end
    end
--@ end
    if admitted == 0 then
        answer[1] = -1 - now
    end
    return answer, need, key, gate[1], held, logs
end

local charges = floor(#ARGV / 2)
if charges == 1 then
    local answer, need, key, field, held, logs = decide(1)
    if need and not look then
        if key then
            write(key, field, held, need)
        end
--@ if logs
        for _, ring in pairs(logs or {}) do
            save(ring)
        end
--@ end
    end
    return answer
end

local function code_of(charge)
    return floor(tonumber(ARGV[2 * charge]) / AMOUNTS)
end

-- Decide the charges of a group; write their states if all of them pass. The bucket comes first,
-- because a server without memory rejects the first write: then nothing changes.
local function decide_group(first, last, answers)
    local passes, staged = true, {}
    fields = last > first and {} or nil
    for charge = first, last do
        local done, answer, need, key, field, held, logs = pcall(decide, charge)
        if need then
            staged[#staged + 1] = {key or false, field, held, need, logs}
        end
        passes = passes and (done and answer[1] >= 0 or not done and code_of(charge) % 4 >= 2)
        answers[charge] = answer
    end
--@ if logs
    if look or not passes then
        rings = {}
    end
--@ end
    local pieces = {}
    for number = 1, passes and not look and #staged or 0 do
        local states = staged[number]
        if states[1] then
            -- A charge of the group before this one may have written more pieces, or fewer.
            states[3][3] = pieces[states[2]] or states[3][3]
            write(states[1], states[2], states[3], states[4])
            pieces[states[2]] = max(states[3][3], 1)
        end
--@ if logs
        for _, ring in pairs(states[5] or {}) do
            save(ring)
        end
--@ end
    end
end

local answers, first = {}, 1
while first <= charges do
    local last = first
    while last < charges and code_of(last + 1) % 2 == 1 do
        last = last + 1
    end
    local done, failure = pcall(decide_group, first, last, answers)
--@ if logs
    rings = done and rings or {}
--@ end
    for number = first, last do
        local answer = failure or answers[number]
        answers[number] = type(answer) == 'table' and answer or {err = 'ERR ' .. tostring(answer)}
    end
    first = last + 1
end
return answers
