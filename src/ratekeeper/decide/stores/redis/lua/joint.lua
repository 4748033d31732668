-- Decide one request of several subjects: every check has room, or none is charged.
--
-- KEYS     two for each check, as of `check`; the second is the first again if it is the only one. One
--          hash may have several checks
-- ARGV[1]  the time in microseconds; empty: the server's
-- ARGV[2]  not empty: decide, but spend nothing
-- ARGV     from the third on, for each check: the gate, the cost, and '1' if the others are charged
--          even if this check fails; with leases, also the three numbers of ARGV[5] to [7] of `check`
--
-- `check` is the script that decides one subject, as a function (see scripts.py). It gets a `redis`
-- whose writes are held back, and whose reads see them: two checks of one subject both count. The
-- writes are made after every check has passed. No write can fail then, except the first one, if the
-- server has no memory left.
--
-- The reply has one element for each check: the reply of `check`, or its error.

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

local peek = ARGV[2] ~= '' and ARGV[2] or nil
local answers, passes, width = {}, true, 2 * (#ARGV - 2) / #KEYS
for i = 1, #KEYS / 2 do
    local a, before = 3 + width * (i - 1), #writes
    local arguments = {ARGV[a], ARGV[a + 1], ARGV[1], peek}
    for more = 3, width - 1 do
        arguments[more + 2] = ARGV[a + more]
    end
    local decided, answer = pcall(check, held_back, {KEYS[2 * i - 1], KEYS[2 * i]}, arguments)
    if decided then
        passes = passes and answer[1] >= 0
    else
        drop_after(before)
        passes = passes and ARGV[a + 2] == '1'
        answer = {err = type(answer) == 'table' and answer.err or 'ERR ' .. tostring(answer)}
    end
    answers[i] = answer
end
if passes then
    for _, write in ipairs(writes) do
        redis.call(unpack(write))
    end
end
return answers
