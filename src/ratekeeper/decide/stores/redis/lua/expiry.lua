-- Make `key` live until `ends`, if that is later than `before`. Its expiry is never shortened.
if ends > before then
    local ms = ends * 1000 - floor(now / 1000)
    if call('PTTL', key) < ms then
        call('PEXPIRE', key, ms)
    end
end
