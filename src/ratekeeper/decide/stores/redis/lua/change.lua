-- Change the states of several gates: each change alone, in order. What a limit owes is returned before
-- the units that are used, and late charges find no room in a limit that owes.
--
-- KEYS  see open.lua
-- ARGV  for each change, the gate and msgpack of a verb and its numbers, one after the other:
--
--     REFUND  the units; the time at which they were charged plus 1, or 0 if it is not known
--     UNDO    for each limit its own units, the time at which they were charged, the units taken from a
--             grant, and the time when that grant ends
--     BACK    the units of a lease that were not spent, and its end
--     LATE    units that were admitted already, and their age
--     GRANT   the units, their microseconds plus 1 or 0 for one window of each limit, and the most units
--     RESET
--
--       A last argument of its own: the time in microseconds, or empty for the server's
--
-- The reply to a change is that of a check of 0 units afterwards (see check.lua), or an error.

local REFUND, UNDO, BACK, LATE, GRANT, RESET = 1, 2, 3, 4, 5, 6
-- After a late charge, states are kept for two seconds, also if they are whole before: the next late
-- charge may be of a time at which they were not (see leasing.py).
local LATE_KEPT = 2000000

--@ if leases
-- Take units out of the group that holds a lease until then; return how many they are.
local function take_hold(extra, units, ends)
    for group = 3, 5, 2 do
        if extra[group] > 0 and ends <= extra[group + 1] then
            units = min(units, extra[group])
            extra[group] = extra[group] - units
            live_holds(extra, 0)
            return units
        end
    end
    return 0
end

--@ end
-- Let debt enter a log that has so much room.
local function fill(ring, extra, room, at)
    local entering = min(room, extra[OWED])
    append(ring, at, entering)
    extra[OWED] = extra[OWED] - entering
end

-- Return a log after units were removed that were charged at that time, or the oldest ones. If those
-- have left the log, older ones go in their place.
local function refund_log(ring, units, charged, extra)
    local size, owed, at = size_of(ring), extra[OWED], max(now, ring.last)
    if owed > 0 then
        local late = charged and charged < ring.last
        extend(ring, extra, at)
        enter(ring, extra, at)
        owed, size = extra[OWED], size_of(ring)
        if not late then
            extra[OWED] = max(owed - units, 0)
            units = min(max(units - owed, 0), size)
            if charged then -- the newest ones, which were charged last
                replace_from(ring, size - units, '')
                return
            end
        end
    end
    if not charged then
        drop_oldest(ring, dead_of(ring, max(now, ring.last) - ring.window))
        drop_oldest(ring, min(units, size_of(ring)))
        return
    end
    local older = dead_of(ring, charged)
    local removed = min(units, older)
    if removed > 0 then -- the newer times move down
        replace_from(ring, older - removed, times(ring, older, size - older))
    end
    fill(ring, extra, removed, at)
end

--@ if leases
-- Return a state after units of a lease were given back, or nothing; see the algorithms' give_back.
local function given_back(gate, g, last, a, b, extra, units, ends)
    local kind, window = gate[g + KIND], gate[g + WINDOW]
    local hold_ends, until_back = held_until(gate, g, ends)
    if now >= until_back then
        return last, a, b
    elseif kind ~= BUCKET then
        local at = kind == FIXED and last or max(now, last)
        if at - at % window ~= ends - 1 - (ends - 1) % window then
            return refunded(gate, g, last, a, b, extra, units, ends - 1)
        elseif extra[OWED] > 0 then
            a, b, extra[OWED] = carry(gate, g, last, a, b, extra[OWED], at)
            last = at
        elseif kind == COUNTER and extra[3] > 0 then
            a, b = rolled(window, last, a, b, at)
            last = at
        end
    end
    local owed = min(extra[OWED], gate[g + DEBT] * (kind == BUCKET and MICROS_PER_UNIT or 1))
    units = take_hold(extra, units, hold_ends) * (kind == BUCKET and MICROS_PER_UNIT or 1)
    extra[OWED], units = max(owed - units, 0), max(units - owed, 0)
    if kind == COUNTER then
        b = max(b - units, 0)
    else
        a = max(a - units, 0)
    end
    if extra[3] + extra[5] > 0 or a + (b or 0) > 0 then
        return last, a, b
    end
end

-- Return a state after units that were admitted at `charged` already; see the algorithms' charge. A
-- higher limit may have admitted more than the capacity.
local function charged_late(gate, g, last, a, b, extra, units, charged)
    local kind, window, capacity = gate[g + KIND], gate[g + WINDOW], gate[g + CAPACITY]
    local owed, before = extra[OWED], a
    if kind == BUCKET then
        a = a + min(owed, gate[g + DEBT] * MICROS_PER_UNIT)
        local full, at = 2 * a / gate[g + NUMERATOR] * gate[g + DENOMINATOR], last
        a, last = drained(gate, g, last, a, full, charged)
        a = max(a, level_with_holds(gate, g, extra, charged, true))
        if owed > 0 and a > capacity * MICROS_PER_UNIT then
            return at, before
        end
        extra[OWED] = 0
        last = a <= 0 and max(charged, last) or last
        a = max(a, 0)
        return last, max(a, min(a + units * MICROS_PER_UNIT, capacity * MICROS_PER_UNIT))
    elseif kind == FIXED then
        local of = charged - charged % window
        if owed > 0 then
            local to = max(last, now)
            a, b, owed = carry(gate, g, last, a, nil, owed, to)
            if owed > 0 then
                return last, before
            end
            last, extra[OWED] = to, 0
        end
        local at = max(last, charged)
        if now - now % window ~= of or at - at % window ~= of then
            return last, a
        end
        a = last - last % window == of and a or 0
        return at, max(a, min(a + units, capacity))
    end
    local at = max(now, last)
    local previous, current = rolled(window, last, a, b, at)
    if owed > 0 then
        previous, current, extra[OWED] = carry(gate, g, last, a, b, owed, at)
    end
    local ago = (at - at % window - charged + charged % window) / window
    if ago == 1 then
        previous = max(previous, min(previous + units, capacity))
    elseif ago < 1 then
        current = max(current, min(current + units, capacity))
    end
    return at, previous, current
end

--@ end
--@ if slots
-- Free the slot of a stamp, or all. The state goes with the last slot.
local function change_slots(slots, stamp, verb)
    if stamp > 0 and (verb == REFUND or verb == UNDO) then
        call('ZREM', slots.key, member_of(stamp))
    end
    local live = '(' .. member_of(max(now, slots.taken))
    if verb == RESET or slots.taken >= 0 and call('ZCOUNT', slots.key, live, '+inf') == 0 then
        call('DEL', slots.key)
        slots.taken = -1
    end
end

--@ end
-- Change a log.
local function change_log(ring, verb, units, time, extra)
    if verb == REFUND or verb == UNDO then
        refund_log(ring, units, time, extra)
--@ if leases
    elseif verb == BACK then
        if ring.last >= time then
            refund_log(ring, units, time, extra)
        else
            local at = max(now, ring.last)
            if extra[OWED] > 0 then
                extend(ring, extra, at)
                enter(ring, extra, at)
            end
            fill(ring, extra, take_hold(extra, units, time), at)
        end
--@ end
    elseif verb == RESET then
        extra[OWED] = 0
        live_holds(extra, max(now, ring.last) - 1)
        drop_oldest(ring, size_of(ring))
    elseif verb == LATE then
        local at = max(ring.last, time)
        if extra[OWED] > 0 then
            extend(ring, extra, at)
            if ring.owed > 0 then
                return
            end
            enter(ring, extra, at)
        end
        ring.oldest = at - ring.window
        drop_oldest(ring, dead_of(ring, ring.oldest))
        append_ended(ring, extra, at)
        live_holds(extra, at)
        -- The newest times, at most as many as the limit has room for, or as there are.
        local room = max(ring.capacity - extra[3] - extra[5], 0)
        local kept = max(room, size_of(ring))
        append(ring, at, min(units, room))
        drop_oldest(ring, max(size_of(ring) - kept, 0))
        ring.need = needed_with(extra, max(at + ring.window, now + LATE_KEPT), ring.window)
    end
end

-- Return the state of another limit after a change: last, a, b; or nothing, if no state is left.
local function changed_count(gate, g, verb, last, a, b, extra, units, time)
    if verb == REFUND or verb == UNDO then
        return refunded(gate, g, last, a, b, extra, units, time)
--@ if leases
    elseif verb == BACK then
        return given_back(gate, g, last, a, b, extra, units, time)
    elseif verb == LATE then
        local at = max(time, last)
        last, a, b = charged_late(gate, g, last, a, b, extra, units, time)
        live_holds(extra, at)
        return last, a, b
--@ end
    elseif verb == RESET then
        last, extra[OWED] = max(now, last), 0
        live_holds(extra, last)
        units = extra[3] + extra[5]
        if units > 0 then
            if gate[g + KIND] == COUNTER then
                return last, 0, units
            end
            return last, units * (gate[g + KIND] == BUCKET and MICROS_PER_UNIT or 1)
        end
        return
    end
    return last, a, b
end

-- Return the reply of a check of 0 units.
local function seen(gate, held, logs, extras, stamp)
    local granted, holding, owing, answer, p = false, false, false, {now}, HELD_FIRST
    for _, extra in pairs(extras) do
        live_holds(extra, 0)
        granted, holding = granted or extra[1] > 0, holding or extra[3] > 0
        owing = owing or extra[OWED] > 0
    end
    for g = GATE_FIRST, #gate, GATE_STEP do
        local extra, size = extras[g] or {0, 0, 0, 0, 0, 0, 0, 0}, #answer
--@ if slots
        if gate[g + KIND] == FLIGHT then
            for _, number in ipairs({look_at(logs[g], stamp)}) do
                answer[#answer + 1] = number
            end
        else
--@ end
        if gate[g + KIND] == LOG then
            local ring = logs[g]
            local oldest = max(now, ring.last) - ring.window
            local dead = extra[OWED] > 0 and 0 or dead_of(ring, oldest)
            local alive = size_of(ring) - dead
            answer[size + 1], answer[size + 2], answer[size + 3] = ring.last, alive, 0
            if granted then
                answer[size + 3] = times(ring, dead, alive)
            elseif extra[OWED] > 0 then
                extend(ring, extra, max(now, ring.last))
                answer[size + 1] = ring.entry((ring.owed > 0 and ring.length or max(ring.due, 1)) - 1)
                answer[size + 2] = ring.length - ring.gone - max(ring.owed, 0)
            else
                answer[size + 2] = alive + (extra[4] > oldest and extra[3] or 0)
                    + (extra[6] > oldest and extra[5] or 0)
            end
        else
            answer[size + 1], answer[size + 2] = held[1] - held[p + 1], held[p + 2]
            if gate[g + KIND] == COUNTER then
                answer[size + 3], p = held[p + 3], p + 1
            end
            p = p + 3
        end
--@ if slots
        end
--@ end
        for number = granted and 1 or 3, holding and 6 or granted and 2 or 0 do
            answer[#answer + 1] = extra[number]
        end
        if owing then
            answer[#answer + 1] = extra[OWED]
        end
    end
    return answer
end

local function change(number)
    local gate = {cmsgpack.unpack(ARGV[2 * number - 1])}
    local verb = {cmsgpack.unpack(ARGV[2 * number])}
    local stamp = 0
--@ if slots
    stamp = #gate % GATE_STEP == 2 and table.remove(gate) or 0
--@ end
    local key, held, logs, extras
    local last_g, strict = #gate, verb[1] == LATE
    --@ open
    local need, p = nil, HELD_FIRST
    extras, logs = extras or {}, logs or {}
    if verb[1] == LATE then
        need = now + LATE_KEPT
    elseif verb[1] == REFUND then
        need = now
    end
    for g = GATE_FIRST, #gate, GATE_STEP do
        local kind, window = gate[g + KIND], gate[g + WINDOW]
        local extra, ring = extras[g] or {0, 0, 0, 0, 0, 0, 0, 0}, logs[g]
        local i = (g - GATE_FIRST) / GATE_STEP * 4
        extras[g] = kind ~= FLIGHT and extra or nil
        live_holds(extra, 0)
        local units, time, granted, ends = verb[2] or 0, verb[3] or 0, 0, 0
        if verb[1] == REFUND then
            time = time > 0 and time - 1
        elseif verb[1] == LATE then
            time = max(now - time, 0)
        elseif verb[1] == BACK and now >= time + LEASE_MAX then
            units = 0 -- they may have been given back before
        elseif verb[1] == RESET then
            extra[1] = 0
        elseif verb[1] == UNDO then
            units, time, granted, ends = verb[i + 2], verb[i + 3], verb[i + 4], verb[i + 5]
            granted = now < ends and granted or 0
        elseif verb[1] == GRANT and kind ~= FLIGHT then
            granted, ends = units, now + (time > 0 and time - 1 or window)
            if now >= extra[2] then
                extra[1], extra[2] = 0, 0
            end
        end
        if granted > 0 then
            extra[1], extra[2] = extra[1] + granted, max(extra[2], ends)
            if verb[1] == GRANT then
                extra[1] = min(extra[1], verb[4])
            end
        end
        local after = granted > 0 and extra[2] or nil
--@ if slots
        if kind == FLIGHT then
            change_slots(ring, stamp, verb[1])
        else
--@ end
        if ring then
            ring.need = nil
            if units > 0 or verb[1] == RESET then
                change_log(ring, verb[1], units, time, extra)
            end
            ring.need = after and max(ring.need or 0, after) or ring.need
            ring.extra = extra
        else
            local last, a, b = held[1] - held[p + 1], held[p + 2], kind == COUNTER and held[p + 3] or nil
            if (last >= 0 or verb[1] == LATE) and (verb[1] == RESET or units > 0) then
                local at, new_a, new_b = changed_count(gate, g, verb[1], last, a, b, extra, units, time)
                --@ put
            end
            if verb[1] == LATE then
                --@ needed
                need = max(need, until_then)
            end
            need = after and max(need or 0, after) or need
            p = p + (kind == COUNTER and 4 or 3)
        end
--@ if slots
        end
--@ end
    end
    local answer = seen(gate, held, logs, extras, stamp)
    if key then
        held = complete(gate, held, extras)
        if held[3] > 0 or held[HELD_FIRST] then
            write(key, gate[1], held, need)
        end
    end
    for _, ring in pairs(logs) do
        save(ring)
    end
    return answer
end

local answers = {}
for number = 1, floor(#ARGV / 2) do
    local done, answer = pcall(change, number)
    answers[number] = (done or type(answer) == 'table') and answer or {err = 'ERR ' .. tostring(answer)}
end
return #answers == 1 and answers[1] or answers
