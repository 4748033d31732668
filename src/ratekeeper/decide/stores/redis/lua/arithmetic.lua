-- The beginning of every script: exact arithmetic.
--
-- Lua's numbers are doubles. Every number below stays under 2^53, where doubles are exact; so are `%`,
-- and the floor of a quotient.

local call, floor, ceil, max, min = redis.call, math.floor, math.ceil, math.max, math.min

-- Return floor(x * n / d) and the remainder, exactly, for x * n / d and n < 2^50 and d < 2^45.
local function multiply_divide(x, n, d)
    local product = x * n
    if product < 9007199254740992 then -- 2^53
        local rest = product % d
        return (product - rest) / d, rest
    end
    -- Long multiplication in base 128: rest * 128 and digit * x both stay below 2^52.
    local whole = (x - x % d) / d
    x = x - whole * d
    local quotient, rest, left, scale = 0, 0, n, 562949953421312 -- 128^7
    while scale >= 1 do
        local digit = floor(left / scale)
        left = left - digit * scale
        local part = rest * 128 + digit * x
        rest = part % d
        quotient = quotient * 128 + (part - rest) / d
        scale = scale / 128
    end
    return whole * n + quotient, rest
end
