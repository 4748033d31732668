-- Remember the name of a settlement for a subject, or forget it.
--
-- KEYS[1]  a hash; its field `names` has the names of the subject, oldest first, without separators
-- ARGV[1]  the name, eight bytes
-- ARGV[2]  for how many milliseconds all names are kept; 0 forgets this one
-- ARGV[3]  the most names that are kept
--
-- The reply is 1 if the name was not known. A name that is forgotten leaves a place with zeros, as in
-- the other engines.

local names = redis.call('HGET', KEYS[1], 'names') or ''
local at = string.find(names, ARGV[1], 1, true)
while at and at % 8 ~= 1 do
    at = string.find(names, ARGV[1], at + 1, true)
end
if ARGV[2] == '0' then
    if at then
        local zeros = string.rep('\0', 8)
        redis.call('HSET', KEYS[1], 'names', string.sub(names, 1, at - 1) .. zeros .. string.sub(names, at + 8))
    end
    return 0
elseif at then
    return 0
end
if #names >= 8 * tonumber(ARGV[3]) then
    names = string.sub(names, 9)
end
redis.call('HSET', KEYS[1], 'names', names .. ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
