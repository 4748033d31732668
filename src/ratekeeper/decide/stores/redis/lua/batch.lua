-- Decide a list of groups in order. All charges of a group have room, or none is made.
--
-- KEYS     two for each charge, as of `check`; the second is the first again if it is the only one
-- ARGV[1]  the time in microseconds; empty: the server's
-- ARGV[2]  not empty: decide, but spend nothing
-- ARGV     from the third on, for each charge: the gate and its amount; with leases, also the three
--          numbers of ARGV[5] to [7] of `check`
--
-- An amount is cost + 2^31 * (1 if the charge is in the group of the charge before + 2 if it is optional
-- + 4 * (equal requests - 1)).
--
-- `check` is the script that decides one subject, as a function (see scripts.py). It gets a `redis`
-- whose writes are held back, and whose reads see them: two charges of one subject both count. The
-- writes of a group are made after every charge of it has passed.

local writes, fields_of, ttl_of, time = {}, {}, {}, nil

-- Hold a write back.
local function hold(write)
    local command, key = write[1], write[2]
    writes[#writes + 1] = write
    if command == 'PEXPIRE' then
        ttl_of[key] = write[3]
        return
    end
    local fields = fields_of[key] or {}
    fields_of[key] = fields
    local step = command == 'HSET' and 2 or 1
    for i = 3, #write, step do
        fields[write[i]] = step == 2 and write[i + 1]
    end
end

-- Drop the writes after the first `count`.
local function drop_after(count)
    local held = writes
    writes, fields_of, ttl_of = {}, {}, {}
    for i = 1, count do
        hold(held[i])
    end
end

local held_back = {}

function held_back.call(command, key, field, ...)
    if command == 'HGET' then
        local fields = fields_of[key]
        local value = fields and fields[field]
        if value == nil then
            return redis.call(command, key, field)
        end
        return value
    elseif command == 'TIME' then
        time = time or redis.call(command)
        return time
    elseif command == 'PTTL' then
        return ttl_of[key] or redis.call(command, key)
    end
    hold({command, key, field, ...})
end

-- Return some fields of a bucket, for a sweep: none that a write held back has changed.
function held_back.pcall(command, key, ...)
    local found, fields = redis.pcall(command, key, ...), fields_of[key]
    if found.err or not fields then
        return found
    end
    local unchanged = {}
    for i = 1, #found, 2 do
        if fields[found[i]] == nil then
            unchanged[#unchanged + 1] = found[i]
            unchanged[#unchanged + 1] = found[i + 1]
        end
    end
    return unchanged
end

-- Return the reply to the first of `count` equal requests, with the number of those that pass. A log's
-- time is that of the first one that does not.
local function decided(keys, arguments, count)
    local first = check(held_back, keys, arguments)
    if count == 1 then
        return first
    end
    local passed, last = first[1] >= 0 and 1 or 0, first
    while passed > 0 and passed < count and last[1] >= 0 do
        last = check(held_back, keys, arguments)
        passed = passed + (last[1] >= 0 and 1 or 0)
    end
    local gate, place = cmsgpack.unpack(arguments[1]), 2
    for g = 2, #gate - (#gate - 1) % 8, 8 do
        if gate[g] == 4 and passed > 0 and last[1] < 0 and type(first[place + 2]) == 'number' then
            first[place + 2] = last[place + 2]
        end
        place = place + (gate[g] < 3 and 2 or 3)
    end
    first[#first + 1] = passed
    return first
end

local peek = ARGV[2] ~= '' and ARGV[2] or nil
local answers, passes, width = {}, true, 2 * (#ARGV - 2) / #KEYS
for i = 1, #KEYS / 2 do
    local a = 3 + width * (i - 1)
    local amount = tonumber(ARGV[a + 1])
    local code = math.floor(amount / 2147483648)
    local arguments = {ARGV[a], amount - code * 2147483648, ARGV[1], peek}
    for more = 2, width - 1 do
        arguments[more + 3] = ARGV[a + more]
    end
    if code % 2 == 0 then -- the first of a group
        passes = true
    end
    local before = #writes
    local done, answer = pcall(decided, {KEYS[2 * i - 1], KEYS[2 * i]}, arguments, math.floor(code / 4) + 1)
    if done then
        passes = passes and answer[1] >= 0
    else
        drop_after(before)
        passes = passes and code % 4 >= 2
        answer = {err = type(answer) == 'table' and answer.err or 'ERR ' .. tostring(answer)}
    end
    answers[i] = answer
    local next_amount = ARGV[a + width + 1]
    if not next_amount or math.floor(tonumber(next_amount) / 2147483648) % 2 == 0 then -- the group's last
        for _, write in ipairs(passes and writes or {}) do
            redis.call(unpack(write))
        end
        drop_after(0)
    end
end
return #answers == 1 and answers[1] or answers
