// Quickstart: an urgent request meets a full engine, first without eviction, then
// with it. It needs nothing but Go, and takes ten seconds:
//
//	go run ./examples/quickstart
//
// Requests are real HTTP, through a real Envoy if there is one. The engine is
// simulated: it has the scheduling, the KV cache and the timing of a real one. picker.go
// is the part to copy.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/examples/admin"
	"github.com/extevict/extevict/extproc"
	"github.com/extevict/extevict/internal/engine"
	"github.com/extevict/extevict/internal/envoy"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// options are what the flags say.
type options struct {
	requests, tokens int
	mode             mode
	gateway          string
	admin            string
	verbose          bool
}

// parse reads the command line.
func parse(args []string, stderr io.Writer) (o options, err error) {
	f := flag.NewFlagSet("quickstart", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.Usage = func() {
		fmt.Fprint(stderr, "Fills an inference engine with batch requests, and lets an urgent one arrive:\nfirst without eviction, then with it.\n\nFlags:\n")
		f.PrintDefaults()
		fmt.Fprint(stderr, "\nThe exit code is 0 if all happened as told, 1 if not, 2 for bad flags.\n")
	}
	f.IntVar(&o.requests, "requests", 8, "how many batch requests there are, 2 to 16: as many as the engine runs at once")
	f.IntVar(&o.tokens, "tokens", 500, "how many tokens each of them generates, 100 to 2000")
	name := f.String("mode", modes[0].name, "what the gateway shows the picker of a response:\nfull-duplex (response_body_mode FULL_DUPLEX_STREAMED: the victim's client gets an error event),\nstreamed (STREAMED: it gets one if the picker owes a reply just then), or trailers (NONE: nothing while it streams, the cheapest)")
	f.StringVar(&o.gateway, "gateway", "auto", "envoy (the binary that $ENVOY_BIN names, or envoy on $PATH), in-process (a fake of it),\nor auto: envoy if there is one, else in-process")
	f.StringVar(&o.admin, "admin", "", "serve the admin endpoint of examples/admin on this loopback `address`, such as 127.0.0.1:9003,\nas long as it runs: /requests lists what is in flight")
	f.BoolVar(&o.verbose, "v", false, "tell of each request")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	for _, m := range modes {
		if m.name == *name {
			o.mode = m
		}
	}
	switch {
	case f.NArg() > 0:
		err = fmt.Errorf("unexpected argument %q", f.Arg(0))
	case o.requests < 2 || o.requests > 16:
		err = errors.New("-requests must be 2 to 16")
	case o.tokens < 100 || o.tokens > 2000:
		err = errors.New("-tokens must be 100 to 2000")
	case o.mode == mode{}:
		err = fmt.Errorf("-mode: there is no %q", *name)
	case o.gateway != "auto" && o.gateway != "envoy" && o.gateway != "in-process":
		err = fmt.Errorf("-gateway: there is no %q", o.gateway)
	}
	if err != nil {
		fmt.Fprintln(stderr, err)
	}
	return o, err
}

// run is the program. It returns the exit code, and leaves nothing behind.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	o, err := parse(args, stderr)
	if errors.Is(err, flag.ErrHelp) {
		return 0
	}
	if err != nil {
		return 2
	}
	out := newScreen(stdout)
	err = tell(ctx, o, out)
	out.clear()
	switch {
	case ctx.Err() != nil:
		fmt.Fprintln(stderr, "interrupted")
		return 1
	case err != nil:
		fmt.Fprintln(stderr, "FAILED:", err)
		return 1
	}
	return 0
}

// tell sets the stage, plays both acts, and clears up.
func tell(ctx context.Context, o options, out *screen) (err error) {
	s := &story{
		options: o, out: out,
		ends:    make(chan engine.End, o.requests+1), // an act's, so that nobody waits for us
		settled: make(chan extproc.Event, o.requests+1),
	}
	s.engine, err = startEngine(o.requests, o.tokens, func(e engine.End) { s.ends <- e })
	if err != nil {
		return err
	}
	defer s.engine.close()

	s.picker = &picker{priorities: map[string]int{batchKey: batchPriority, urgentKey: urgentPriority}}
	var registry abort.Registry
	server := s.picker.newServer(extproc.WithObserver(func(e extproc.Event) { s.settled <- e }), extproc.WithRegistry(&registry))
	g, err := startGateway(ctx, o.gateway, o.mode, server)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, g.close()) }()

	transport := &http.Transport{Protocols: newProtocols()}
	defer transport.CloseIdleConnections()
	s.client, s.url = &http.Client{Transport: transport}, g.url

	out.print("An urgent request meets a full engine: first without eviction, then with it.\n")
	out.print("gateway  %s", g.name)
	if _, err := envoy.Find(); err != nil && o.gateway == "auto" {
		out.print("         (no real Envoy: set ENVOY_BIN to one, or have envoy on PATH)")
	}
	out.print("mode     %s: response body %s, trailers SEND", o.mode.name, o.mode.body)
	out.print("engine   simulated, an 8B model on an H100: %d requests at once, %d KV blocks", o.requests, s.engine.blocks)
	if o.admin != "" {
		l, err := admin.Listen(o.admin, false)
		if err != nil {
			return err
		}
		a := admin.NewServer(admin.Handler(admin.Config{Registry: &registry, Evictor: &s.picker.evictor}))
		go a.Serve(l) // ends with a.Close
		defer a.Close()
		out.print("admin    http://%s/requests", l.Addr())
	}
	out.print("clients  streamed chat completions over HTTP/2")

	without, err := s.play(ctx, "1  Without eviction", false)
	if err != nil {
		return err
	}
	with, err := s.play(ctx, "2  With eviction", true)
	if err != nil {
		return err
	}
	if failed := s.check(without, with); len(failed) > 0 {
		return errors.New(strings.Join(failed, "\n        "))
	}
	s.result(without, with)
	return nil
}
