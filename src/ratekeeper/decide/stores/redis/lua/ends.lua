-- Set `ends`: the second when states end that ended at `before`, and are needed until `need`. It is an
-- eighth later than necessary, and at least a second from now, so that a busy key sets it occasionally,
-- not each time.
local ends = before
if need and need + 1000 > before * 1000000 then
    -- A test's clock may stand still while the server's runs, so then it is an hour.
    local spare = max((need + 1000 - now) * 1.125, given and 3600000000 or 1000000)
    ends = max(before, ceil((now + spare) / 1000000))
end
