-- Give leased units back, and charge units that nodes have admitted already; for several subjects.
--
-- KEYS     the hash of each report's subject
-- ARGV[1]  the time in microseconds; empty: the server's
-- ARGV     from the second on, for each report: the gate; 'back' or 'late'; the units; and the end of
--          the lease, or the age of the units
--
-- `check` and `refund` are the scripts of one subject, as functions (see scripts.py). The reply has one
-- element for each report: the reply of `check` to a cost of 0 after the report, or an error.

local answers = {}
for i = 1, #KEYS do
    local key, a = {KEYS[i]}, 4 * i - 2
    local done, answer = pcall(function()
        if ARGV[a + 1] == 'late' then
            check(redis, key, {ARGV[a], ARGV[a + 2], ARGV[1], nil, 'late', ARGV[a + 3]})
        else
            refund(redis, key, {ARGV[a], ARGV[a + 2], ARGV[1], '', nil, ARGV[a + 3]})
        end
        return check(redis, key, {ARGV[a], '0', ARGV[1], 'look'})
    end)
    answers[i] = done and answer
        or {err = type(answer) == 'table' and answer.err or 'ERR ' .. tostring(answer)}
end
return answers
