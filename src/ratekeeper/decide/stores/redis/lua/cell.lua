-- Read a cell, or replace its value if nothing has changed it.
--
-- KEYS[1]  the value, a string
-- ARGV[1]  the time in microseconds; empty: the server's
-- ARGV[2]  the value to write; without it, the cell is read
-- ARGV[3]  for how many milliseconds it lasts
-- ARGV[4]  the value that it must have; without it, it must have none
--
-- The reply is an array: the time, and the value; after a write 1, or 0 if it has another value.

local now = tonumber(ARGV[1])
if not now then
    local time = redis.call('TIME')
    now = time[1] * 1000000 + time[2]
end
local held = redis.call('GET', KEYS[1])
if not ARGV[2] then
    return {now, held}
elseif held ~= (ARGV[4] or false) then
    return {now, 0}
end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return {now, 1}
