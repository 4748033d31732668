-- The states of a subject's counts. `arithmetic.lua` is before it.
--
-- Each limit has one place, whatever the other limits of its rule are. A log has a key of its own: see
-- `rings.lua`; so have requests in flight: see `slots.lua`. The states of all other limits of a rule are in a field of a bucket, a hash that many
-- subjects share. The field is 8 bytes of a hash of rule and subject. Its value is
--
--     base   the time of the last write, in microseconds, in 7 bytes: less than 2^52, until 2112. The bits
--            above are the version of this layout, 0
--     ends   the second when the states end, in 4 bytes. The hash lives at least as long
--     msgpack of the numbers of each limit: id, lag, a (, b)
--
-- id     which limit; odd if there is a b. Negative (and with a b): units granted on top, or from -2^33
--        down units that are leased: -id - 2^33 is the first group of holds, -id - 2^34 the second (see
--        algorithms/holds.py), -id - 3 * 2^33 what the limit owes (see algorithms/debt.py)
-- lag    base - lag is the time of the last admission (or refund) under this limit; of a bucket that
--        is refilled in steps, the time of its last step
-- a, b   bucket     millionths of a unit used
--        fixed      units counted in the window of that admission
--        counter    units counted in the window before, units counted in this one
--        granted    units left, microseconds since the epoch at which they end
--        leased     units held, microseconds since the epoch until which they are held
--        owed       units, of a bucket in millionths; 0
--
-- A state that has ended equals an absent one, and is deleted in passing: see `write`.
--
-- A field has at most 64 bytes of a value; a longer one continues in the fields \2 1:<field>,
-- \2 2:<field> and so on. A hash of short values is one packed piece of memory, of half the size or
-- less. A field that has NUMBERS_MAX numbers, of about 200 limits, gets no new states. Otherwise the
-- limits that a caller invents under one name would make each of its checks slower.
--
-- In the scripts, a field is an array: base, ends, its number of pieces, and the numbers of the limits.
--
-- A gate is msgpack of the field and nine numbers for each limit, KIND to DEBT, one after the other.

local KIND, ID, CAPACITY, NUMERATOR, DENOMINATOR, WINDOW, FULL, STEP, DEBT = 0, 1, 2, 3, 4, 5, 6, 7, 8
local BUCKET, FIXED, COUNTER, LOG, FLIGHT = 1, 2, 3, 4, 5
local GATE_FIRST, GATE_STEP, HELD_FIRST, OWED = 2, 9, 4, 7
local MICROS_PER_UNIT, AMOUNTS = 1000000, 2147483648
local PIECE_BYTES, NUMBERS_MAX, HOLD, ENDS_MAX = 64, 640, 8589934592, 4294967295

-- See open.lua.
local fields, next_key = nil, 1

-- The server's time, not the caller's: clocks of nodes differ, and a bucket would admit too much
-- by the difference. Only tests give a time, as the last argument.
local now, given
if #ARGV % 2 == 1 then
    given = tonumber((string.gsub(ARGV[#ARGV], 'look', '')))
end
if given then
    now = given
else
    local time = call('TIME')
    now = time[1] * 1000000 + time[2]
end

-- Write a field; its states are needed until `need`. Sweep: delete the states of the bucket that have
-- ended, or those among 32 random ones.
--
-- A bucket outlives most of its states. So one charge or refund in 128 sweeps, and so do a reset (which
-- needs nothing longer) and one new state in eight: if a fourth of the states of a bucket have ended,
-- that deletes as many as are added. Tests with their own clock do not sweep.
local function write(key, field, held, need)
    local before, had = held[2], held[3]
    --@ ends
    held[2] = ends < ENDS_MAX and ends or ENDS_MAX
    local packed = ''
    if held[HELD_FIRST] then
        packed = struct.pack('>I7I4', held[1], held[2]) .. cmsgpack.pack(unpack(held, HELD_FIRST))
    end
    if packed ~= '' and #packed <= PIECE_BYTES and had <= 1 then
        call('HSET', key, field, packed)
    else
        local pieces, fields = ceil(#packed / PIECE_BYTES), {}
        for number = 0, pieces - 1 do
            fields[2 * number + 1] = number == 0 and field or '\2' .. number .. ':' .. field
            fields[2 * number + 2] =
                string.sub(packed, number * PIECE_BYTES + 1, (number + 1) * PIECE_BYTES)
        end
        if pieces > 0 then
            call('HSET', key, unpack(fields))
        end
        for number = pieces, had - 1 do
            call('HDEL', key, number == 0 and field or '\2' .. number .. ':' .. field)
        end
        held[3] = pieces
    end
    --@ expiry
    if not given and (not need or now % (before > 0 and 128 or 8) == 0) then
        local some, dead = redis.pcall('HRANDFIELD', key, 32, 'WITHVALUES'), {}
        if some.err and not need then -- the user may not run it; a check has charged already
            error(some)
        end
        for i = 1, #some, 2 do
            local name, value = some[i], some[i + 1]
            -- A piece of a longer value has a longer name.
            if #name == 8 and struct.unpack('>I4', value, 8) * 1000000 <= now then
                dead[#dead + 1] = name
                for number = 1, #value == PIECE_BYTES and 127 or 0 do
                    dead[#dead + 1] = '\2' .. number .. ':' .. name
                end
            end
        end
        if #dead > 0 then
            call('HDEL', key, unpack(dead))
        end
    end
end
