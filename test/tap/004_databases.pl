# Databases and the extension come and go while a worker is busy there; and a server lacks room for one more worker.

use strict;
use warnings;

use IO::Socket::INET;
use PostgreSQL::Test::Utils;
use RetrysafeCluster;
use Test::More;
use Time::HiRes qw(time sleep);

my $node = retrysafe_node('main');
$node->append_conf('postgresql.conf', "retrysafe.allowed_addresses = '127.0.0.1'");
$node->start;

# What the worker of a database does just now.
sub state_is
{
	my ($server, $database, $state) = @_;
	return $server->poll_query_until('postgres',
		"SELECT count(*) = 1 FROM retrysafe.outbox_workers WHERE database = '$database' AND state = '$state'");
}

sub count_in_log
{
	my ($server, $text) = @_;
	return scalar(() = slurp_file($server->logfile) =~ /\Q$text\E/g);
}

# The view of all workers is read here, where no test changes anything.
add_destination($node, 'elsewhere');

# --- DROP and CREATE EXTENSION ---------------------------------------------------------------------------------------

$node->safe_psql('postgres', 'CREATE DATABASE extension');
my $before = add_destination($node, 'before', database => 'extension');
tell($node, 'before', 'hang');
emit_in($node, 'extension', map { "e$_" } 1 .. 100);
ok(state_is($node, 'extension', 'publishing'), 'a busy worker');
my $began = time;
$node->safe_psql('extension', 'DROP EXTENSION retrysafe CASCADE');
cmp_ok(time - $began, '<', 10, 'DROP EXTENSION CASCADE beside it');
my $after = add_destination($node, 'after', database => 'extension');
emit_in($node, 'extension', 'new');
ok(defined delivered_within($after, 10, 'new'), 'CREATE EXTENSION afterwards works, without a restart');
is(join(' ', delivered($before)), '', 'and what was dropped is not delivered');

# --- DROP DATABASE ---------------------------------------------------------------------------------------------------

$node->safe_psql('postgres', 'CREATE DATABASE dropped');
my $file = add_destination($node, 'dropped', options => '"delay_ms": 30000', database => 'dropped');
emit_in($node, 'dropped', 'slow');
ok(state_is($node, 'dropped', 'publishing'), 'a busy worker');
$began = time;
$node->safe_psql('postgres', 'DROP DATABASE dropped');
cmp_ok(time - $began, '<', 10, 'DROP DATABASE beside it');

# It takes connections and never answers.
my $silent = IO::Socket::INET->new(Listen => 16, LocalAddr => '127.0.0.1', Timeout => 30) or die "no socket: $!";
$node->safe_psql('postgres', 'CREATE DATABASE requesting');
my $url = 'http://127.0.0.1:' . $silent->sockport . '/';
$node->safe_psql('requesting', <<SQL);
CREATE SCHEMA retrysafe;
CREATE EXTENSION retrysafe SCHEMA retrysafe;
SELECT retrysafe.outbox_create_destination('web', 'http', '{"url": "$url"}');
SQL
emit_in($node, 'requesting', 'unanswered');
my $connection = $silent->accept or die "no request: $!";
sysread $connection, my $request, 4;
is($request, 'POST', 'a worker with a request that hangs');
$began = time;
$node->safe_psql('postgres', 'DROP DATABASE requesting');
cmp_ok(time - $began, '<', 10, 'DROP DATABASE beside it');

# --- CREATE DATABASE … TEMPLATE --------------------------------------------------------------------------------------

$node->safe_psql('postgres', 'CREATE DATABASE original');
$file = add_destination($node, 'original', database => 'original');
tell($node, 'original', 'hang');
emit_in($node, 'original', 'copied');
ok(state_is($node, 'original', 'publishing'), 'a busy worker');
$began = time;
$node->safe_psql('postgres', 'CREATE DATABASE clone TEMPLATE original');
cmp_ok(time - $began, '<', 10, 'CREATE DATABASE with its database as the template');
ok(state_is($node, 'clone', 'suspended'), 'the worker of the clone is suspended');
emit_in($node, 'clone', 'cloned');
forget_told($node, 'original');
emit_in($node, 'original', 'later');
ok(defined delivered_within($file, 20, qw(copied later)), 'the original goes on');
# Were the clone to publish, it would have by now: it polls as often as the original.
sleep 1;
is(join(' ', delivered($file)), 'copied later', 'and the clone publishes nothing');
$node->safe_psql('clone', q(SELECT retrysafe.outbox_consent('fork')));
ok(defined delivered_within($file, 20, qw(copied later copied cloned)), 'before somebody consents');

balance($node, 'after', $after, database => 'extension');
no_crash($node);

# --- no free slot ----------------------------------------------------------------------------------------------------

# One for logical replication, one for the launcher, one for a worker.
my $full = retrysafe_node('full');
$full->append_conf('postgresql.conf', 'max_worker_processes = 3');
$full->start;
$file = add_destination($full, 'first');
emit($full, 'e1');
ok(defined delivered_within($file, 10, 'e1'), 'the one worker that there is room for');

$full->safe_psql('postgres', 'CREATE DATABASE waiting');
$file = add_destination($full, 'second', database => 'waiting');
emit_in($full, 'waiting', 'w1');
ok( $full->poll_query_until('waiting',
		q(SELECT state = 'no worker slot is free' FROM retrysafe.outbox_workers WHERE process = 'launcher')),
	'the lack of a slot shows');
sleep 7;    # for some more attempts to start a worker
is(count_in_log($full, 'no background worker slot is free for'), 1, 'and is said once');
is(join(' ', delivered($file)), '', 'nothing is published there');

$full->safe_psql('postgres', 'DROP EXTENSION retrysafe CASCADE');
ok(defined delivered_within($file, 40, 'w1'), 'a free slot is taken');
is( $full->safe_psql('waiting', q(SELECT state FROM retrysafe.outbox_workers WHERE process = 'launcher')),
	'running', 'and shows');
is(count_in_log($full, 'no background worker slot is free for'), 1, 'still said once');

balance($full, 'second', $file, database => 'waiting');
no_crash($full);

done_testing();
