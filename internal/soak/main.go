// Command soak runs everything there is, for minutes, as badly as it gets: a crowd of clients
// that stream, upload slowly, hang up, stall and retry calls engines through a real Envoy and
// an ext_proc server with a Pool; requests are evicted at random, engines are drained, the
// server's code panics, and all but the clients are restarted again and again.
//
// Nothing is in flight at quiet points, every half minute. There it checks that each request
// had one outcome, was aborted only if somebody chose it, and that its client's end follows
// from its outcome or from a restart; and that goroutines, memory, file descriptors, entries
// and the engines' KV blocks are back where they were. It prints what it finds, and exits with
// status 1 if anything is wrong.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/signal"
	"runtime"
	"time"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/internal/envoy"
)

func main() {
	minutes := flag.Float64("minutes", 5, "how long")
	seed := flag.Uint64("seed", rand.Uint64N(1e6), "of the clients' plans and of the faults")
	clients := flag.Int("clients", 40, "how many at once")
	flag.Parse()
	bin, err := envoy.Find()
	if err == nil {
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
		defer stop()
		err = run(ctx, os.Stdout, config{bin: bin, seed: *seed, clients: *clients,
			length: time.Duration(*minutes * float64(time.Minute)), round: 30 * time.Second})
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "soak:", err)
		os.Exit(1)
	}
}

type config struct {
	bin           string // Envoy
	seed          uint64
	clients       int
	length, round time.Duration
}

// A soak is a run.
type soak struct {
	config
	out     io.Writer
	start   time.Time
	account *account
	gateway *gateway
	crowd   *crowd
	base    resources
}

// run runs a soak until it is over or ctx is done. It fails if anything was wrong.
func run(ctx context.Context, out io.Writer, c config) error {
	fmt.Fprintf(out, "seed %d, %d clients, %v\n", c.seed, c.clients, c.length)
	s := &soak{config: c, out: out, start: time.Now(), account: newAccount(out, c.seed)}
	g, err := startGateway(ctx, c.bin, s.account, abort.AborterFunc(failingAborter))
	if err != nil {
		return err
	}
	sampling, stop := context.WithCancel(ctx)
	sampled := make(chan struct{})
	go func() { // ends with stop
		defer close(sampled)
		g.sample(sampling)
	}()
	defer func() {
		stop()
		<-sampled
		g.close()
	}()
	s.gateway, s.crowd = g, newCrowd(g, s.account)
	s.quiet()
	f := newFaults(g, s.account)
	for left := c.length; left > time.Second && ctx.Err() == nil; left = c.length - time.Since(s.start) {
		if err := s.noise(ctx, f, min(left, c.round)); err != nil {
			return err
		}
		if ctx.Err() == nil { // else the terminal may have interrupted Envoy too
			s.quiet()
		}
	}
	fmt.Fprintf(out, "after %v:\n%s", time.Since(s.start).Round(time.Second), s.account.summary())
	if n := s.account.violations; n > 0 {
		return fmt.Errorf("%d violations with seed %d", n, c.seed)
	}
	return ctx.Err()
}

// noise has the crowd call and the faults happen, for a while and until all calls have ended.
func (s *soak) noise(ctx context.Context, f *faults, d time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	over := make(chan struct{})
	go func() { // ends when all clients have their ends
		defer close(over)
		s.crowd.run(ctx, s.clients)
	}()
	failed := make(chan error, 1)
	go func() { failed <- f.run(ctx) }() // ends with ctx
	tick := time.NewTicker(10 * time.Second)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			s.progress()
		case <-over:
			return <-failed
		}
	}
}

func (s *soak) progress() {
	st := s.gateway.pool.Status()
	s.account.mu.Lock()
	defer s.account.mu.Unlock()
	n := s.account.counts
	fmt.Fprintf(s.out, "%6v  %d requests: %d completed, %d aborted, %d closed; %d tracked, %d wait; %d goroutines, %d violations\n",
		time.Since(s.start).Round(time.Second), n["requests"], n["streams completed"], n["streams aborted"], n["streams closed"],
		s.gateway.evictor.Len(), st.Waiting, runtime.NumGoroutine(), s.account.violations)
}
