-- Arguments: server id, sequence, account, stream (0: new), entry, ttl in ms, candidate for a new epoch, 1 if adopted.
-- Returns {verdict}, or {'granted', stream, expiry in ms, epoch, revision}. Rules: `domain/fencing.py`.
local server_id, account, entry = ARGV[1], ARGV[3], ARGV[5]
local sequence, stream, ttl_ms = digits(ARGV[2]), digits(ARGV[4]), tonumber(ARGV[6])
local adopted = ARGV[8] == '1'
local is_new = tonumber(ARGV[4]) == 0 and not adopted

local epoch = current_epoch(ARGV[7])
expire()
local held = redis.call('HGET', HOLDERS, server_id)
if held then
    local held_sequence, held_stream, held_account = string.sub(held, 1, 20), string.sub(held, 21, 40), string.sub(held, 41)
    local held_adopted = held_stream == digits('0')
    local takes_back = held_adopted and not adopted and not is_new
    if adopted and not held_adopted then
        return {'held'}
    elseif sequence < held_sequence and not takes_back then
        return {'old record'}
    elseif not adopted and not is_new and stream < held_stream then
        return {'old stream'}
    elseif sequence == held_sequence and account ~= held_account then
        return {'other account'}
    elseif is_new and held_stream >= digits(now_us) then
        now_us = string.format('%.0f', tonumber(held_stream) + 1)
    end
end
if is_new then
    stream = digits(now_us)
end
local expires_ms = now_ms + ttl_ms
local revision = redis.call('INCR', REVISION)
redis.call('HSET', HOLDERS, server_id, sequence .. stream .. account)
redis.call('HSET', ENTRIES, server_id, entry)
redis.call('ZADD', EXPIRIES, expires_ms, server_id)
redis.call('ZADD', CHANGES, revision, server_id)
redis.call('ZREM', REMOVALS, server_id)
return {'granted', stream, string.format('%.0f', expires_ms), epoch, revision}
