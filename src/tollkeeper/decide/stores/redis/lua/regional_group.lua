-- Read or set the shares of a group of keys, or count what is due in it.
--
-- KEYS[1]  the shares; KEYS[2]: the subjects that are due
-- ARGV[1]  'get', 'count', 'fence' or 'set'
-- ARGV[2]  fence, set: the leader's fencing token
-- ARGV[3]  set: the shares, as in KEYS[1]
--
-- The reply is an array: the numbers of the shares, one number, or the token that the group has now.

local VERSION, TOKEN = 1, 2
if ARGV[1] == 'count' then
    return {redis.call('ZCARD', KEYS[2])}
end
local packed = redis.call('GET', KEYS[1])
local done, shares = pcall(cmsgpack.unpack, packed or '')
if not done or type(shares) ~= 'table' or type(shares[TOKEN]) ~= 'number' then
    shares = {VERSION, 0} -- there are none, or they are damaged: the leader sets them again
end
if ARGV[1] == 'get' then
    return shares
end
local token = tonumber(ARGV[2])
if token < shares[TOKEN] then
    return {shares[TOKEN]}
end
if ARGV[1] == 'set' then
    packed = ARGV[3]
elseif token > shares[TOKEN] then
    shares[TOKEN] = token
    packed = cmsgpack.pack(shares)
end
redis.call('SET', KEYS[1], packed)
return {token}
