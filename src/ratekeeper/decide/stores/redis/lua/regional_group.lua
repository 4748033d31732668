-- Read or set the shares of a group of keys, or count the subjects that are due in it.
--
-- KEYS[1]  the subjects that are due; KEYS[2]: the shares
-- ARGV[1]  'get', 'count', 'fence' or 'set'
-- ARGV[2]  fence, set: the leader's fencing token
-- ARGV[3]  set: the shares, as in KEYS[2]
--
-- The reply is an array: the epoch, the share, the token, the other numbers of the shares, and the names of the
-- regions that are live; one number; or the token that the group has now.

local VERSION, SHARE_BYTES, TOKEN_BYTES, SHARES_BYTES = 2, 14, 21, 34
if ARGV[1] == 'count' then
    return {redis.call('ZCARD', KEYS[1])}
end
local packed = redis.call('GET', KEYS[2]) or ''
if #packed < TOKEN_BYTES or string.byte(packed) ~= VERSION then
    -- There are none, or they are damaged: the leader sets them again.
    packed = struct.pack('>BI7I3I3I7', VERSION, 0, 0, 1, 0)
end
local token = struct.unpack('>I7', packed, SHARE_BYTES + 1)
if ARGV[1] == 'get' then
    if #packed < SHARES_BYTES then
        return {token}
    end
    local reply = {struct.unpack('>I7I3I3I7I3I3I7', packed, 2)}
    reply[#reply] = nil
    for name in string.gmatch(string.sub(packed, SHARES_BYTES + 1), '%S+') do
        reply[#reply + 1] = name
    end
    return reply
end
local given = tonumber(ARGV[2])
if given < token then
    return {token}
end
if ARGV[1] == 'set' then
    packed = ARGV[3]
else
    packed = string.sub(packed, 1, SHARE_BYTES) .. struct.pack('>I7', given) .. string.sub(packed, TOKEN_BYTES + 1)
end
redis.call('SET', KEYS[2], packed)
return {given}
