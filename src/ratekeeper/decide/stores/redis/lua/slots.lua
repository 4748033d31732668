-- Requests in flight: each limit is a sorted set of its own. `rings.lua` includes it.
--
-- The key has the hash tag of the subject's bucket. A member is the stamp of a request, and its score the
-- time at which its slot ends, in microseconds. The score of the empty member is the time at which the
-- last slot was taken. `algorithms/in_flight.py` explains the rest.
--
-- Where a log has a ring, such a limit has a table with `pending`: the ends of slots that charges of the
-- call take or renew, by stamp. They are written when all charges of the group have passed.

local function slots_of(key)
    if not rings[key] then
        local taken = tonumber(call('ZSCORE', key, '') or '-1')
        rings[key] = {key = key, taken = taken, before = taken, pending = {}}
    end
    return rings[key]
end

local function member_of(stamp)
    return string.format('%.0f', stamp)
end

-- Return the five numbers that a reply has of a limit: when the last slot was taken, how many have not
-- ended, when the first and the last of these end, and when that of the stamp ends: 0 if it has none, or
-- -1 without a stamp.
local function look_at(slots, stamp)
    local at = max(now, slots.taken)
    local used, first, last, own = 0, 0, 0, stamp > 0 and 0 or -1
    slots.at = at
    if next(slots.pending) then
        local found, stored = {}, call('ZRANGEBYSCORE', slots.key, '(' .. member_of(at), '+inf', 'WITHSCORES')
        for i = 1, #stored, 2 do
            found[stored[i]] = tonumber(stored[i + 1])
        end
        for name, ends in pairs(slots.pending) do
            found[name] = ends
        end
        for name, ends in pairs(found) do
            used, last, first = used + 1, max(last, ends), first > 0 and min(first, ends) or ends
            own = stamp > 0 and name == member_of(stamp) and ends or own
        end
    elseif slots.taken >= 0 then
        used = call('ZCOUNT', slots.key, '(' .. member_of(at), '+inf')
        if used > 0 then
            first = tonumber(call('ZRANGEBYSCORE', slots.key, '(' .. member_of(at), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2])
            last = tonumber(call('ZREVRANGE', slots.key, 0, 0, 'WITHSCORES')[2])
            local ends = stamp > 0 and tonumber(call('ZSCORE', slots.key, member_of(stamp)) or '0')
            own = ends and (ends > at and ends or 0) or own
        end
    end
    slots.own = own
    return slots.taken, used, first, last, own
end

--@ if check
-- Take a slot after `look_at`, or renew the one that the stamp has.
local function take_slot(slots, stamp)
    if stamp > 0 then
        slots.pending[member_of(stamp)] = max(slots.own, slots.at + slots.window)
        if slots.own == 0 then
            slots.taken = slots.at
        end
    end
end

local function save_slots(slots)
    local need, members = 0, {}
    for name, ends in pairs(slots.pending) do
        need, members[#members + 1], members[#members + 2] = max(need, ends), ends, name
    end
    if need == 0 then
        return
    elseif slots.taken ~= slots.before or slots.before < 0 then
        call('ZREMRANGEBYSCORE', slots.key, '-inf', member_of(slots.taken))
        members[#members + 1], members[#members + 2] = slots.taken, ''
    end
    for i = 1, #members, 2000 do
        call('ZADD', slots.key, unpack(members, i, min(i + 1999, #members)))
    end
    slots.pending, slots.before = {}, slots.taken
    -- A test's clock may stand still while the server's runs, so then it is an hour.
    local ms = ceil((need - now) / 1000) + (given and 3600000 or 1000)
    if call('PTTL', slots.key) < ms then
        call('PEXPIRE', slots.key, ms + floor(ms / 8))
    end
end
--@ end
