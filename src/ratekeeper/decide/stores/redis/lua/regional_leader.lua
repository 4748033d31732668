-- Elect the leader of a region, keep its notes, and read the clock.
--
-- KEYS[1]  the leader: msgpack of its name, its fencing token, and until when it leads
-- KEYS[2]  the notes: a hash
-- ARGV[1]  the time in microseconds; empty: the server's
-- ARGV[2]  'lead', 'leave', 'note', 'notes' or 'time'
-- ARGV[3]  the name
-- ARGV[4]  lead: for how many microseconds; note: the text
-- ARGV[5]  lead: the lowest token to have; note: the most notes
--
-- The reply is an array: the leader's name and token; names and texts; or the time.

local now = tonumber(ARGV[1])
if not now then
    local time = redis.call('TIME')
    now = time[1] * 1000000 + time[2]
end
local what, name = ARGV[2], ARGV[3]
if what == 'time' then
    return {now}
elseif what == 'notes' then
    local found = {}
    for _, each in ipairs(redis.call('HKEYS', KEYS[2])) do
        found[#found + 1], found[#found + 2] = each, redis.call('HGET', KEYS[2], each)
    end
    return found
elseif what == 'note' then
    local is_new = not redis.call('HGET', KEYS[2], name)
    if is_new and #redis.call('HKEYS', KEYS[2]) >= tonumber(ARGV[5]) then
        return {}
    end
    redis.call('HSET', KEYS[2], name, ARGV[4])
    return {1}
end
local packed = redis.call('GET', KEYS[1])
local done, leader = pcall(cmsgpack.unpack, packed or '')
if not done or type(leader) ~= 'table' or not (leader[1] and leader[2] and leader[3]) then
    leader = {'', 0, 0} -- there is none, or it is damaged
end
if what == 'lead' then
    local left, lasts = leader[3] - now, tonumber(ARGV[4])
    if name ~= leader[1] and (left <= 0 or left > lasts) then -- more: the clock was set back
        leader[1], leader[2] = name, leader[2] + 1
    end
    if name == leader[1] then
        leader[2] = math.max(leader[2], tonumber(ARGV[5]))
        leader[3] = now + lasts
    end
elseif leader[1] == name then
    leader[1], leader[3] = '', 0
end
redis.call('SET', KEYS[1], cmsgpack.pack(leader))
return {leader[1], leader[2]}
