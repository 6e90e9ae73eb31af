-- Arguments: server id, stream. Returns 1 if the stream held the lease, which then has ended.
local held = redis.call('HGET', HOLDERS, ARGV[1])
if held and string.sub(held, 21, 40) == digits(ARGV[2]) then
    drop(ARGV[1])
    return 1
end
return 0
