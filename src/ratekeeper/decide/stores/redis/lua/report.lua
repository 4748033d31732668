-- Give leased units back, and charge units that nodes have admitted already; for several subjects.
--
-- KEYS     two for each report, as in `joint`
-- ARGV[1]  the time in microseconds; empty: the server's
-- ARGV     from the second on, for each report: the gate; 'back' or 'late'; the units; and the end of
--          the lease, or the age of the units
--
-- `check` and `refund` are the scripts of one subject, as functions (see scripts.py). The reply has one
-- element for each report: the reply of `check` to a cost of 0 after the report, or an error.

local answers = {}
for i = 1, #KEYS / 2 do
    local keys, a = {KEYS[2 * i - 1], KEYS[2 * i]}, 4 * i - 2
    local done, answer = pcall(function()
        if ARGV[a + 1] == 'late' then
            check(redis, keys, {ARGV[a], ARGV[a + 2], ARGV[1], nil, 'late', ARGV[a + 3]})
        else
            refund(redis, keys, {ARGV[a], ARGV[a + 2], ARGV[1], '', nil, ARGV[a + 3]})
        end
        return check(redis, keys, {ARGV[a], '0', ARGV[1], 'look'})
    end)
    answers[i] = done and answer
        or {err = type(answer) == 'table' and answer.err or 'ERR ' .. tostring(answer)}
end
return answers
