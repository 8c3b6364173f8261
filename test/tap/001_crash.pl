# Workers, sessions and the postmaster are killed: the server comes back, and so does delivery, with the same ids.

use strict;
use warnings;

use IPC::Run;
use PostgreSQL::Test::Utils;
use RetrysafeCluster;
use Test::More;

my $node = retrysafe_node('main');
$node->append_conf('postgresql.conf', 'restart_after_crash = on');
$node->start;
my $file = add_destination($node, 'd');

emit($node, 'e1');
ok(defined delivered_within($file, 10, 'e1'), 'a first event');

kill_process(worker_pid($node));
$node->poll_query_until('postgres', 'SELECT true');
emit($node, 'e2');
ok(defined delivered_within($file, 10, qw(e1 e2)), 'after SIGKILL of the worker');

# A session that has emitted and not committed dies: nothing of it is delivered.
my $handle = IPC::Run::start(
	[
		'psql', '-XAtq', '-d', $node->connstr('postgres'), '-c',
		"BEGIN; SELECT retrysafe.outbox_emit(NULL, 'lost', 't', '{}'); SELECT pg_sleep(600);"
	],
	'>', '/dev/null', '2>', '/dev/null');
$node->poll_query_until('postgres',
	q(SELECT count(*) = 1 FROM pg_stat_activity WHERE query LIKE '%pg_sleep(600)%' AND pid <> pg_backend_pid()));
my $victim = $node->safe_psql('postgres',
	q(SELECT pid FROM pg_stat_activity WHERE query LIKE '%pg_sleep(600)%' AND pid <> pg_backend_pid()));
kill_process($victim);
$handle->finish;
$node->poll_query_until('postgres', 'SELECT true');
emit($node, 'e3');
ok(defined delivered_within($file, 10, qw(e1 e2 e3)), 'after SIGKILL of a session, without what it had not committed');

# SIGKILL of the postmaster: all processes notice, and the next server can start.
my $worker = worker_pid($node);
$node->kill9;
my $gone = 0;
for (1 .. 200)
{
	$gone = !kill(0, $worker);
	last if $gone;
	select undef, undef, undef, 0.05;
}
ok($gone, 'the death of the postmaster ends the worker');
for (1 .. 50)
{
	last if $node->start(fail_ok => 1);
	select undef, undef, undef, 0.2;
}
emit($node, 'e4');
ok(defined delivered_within($file, 10, qw(e1 e2 e3 e4)), 'after SIGKILL of the postmaster');

$node->stop('immediate');
$node->start;
emit($node, 'e5');
ok(defined delivered_within($file, 10, qw(e1 e2 e3 e4 e5)), 'after an immediate stop');

balance($node, 'd', $file);
no_crash($node);

done_testing();
