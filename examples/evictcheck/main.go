// Evictcheck tells whether eviction frees capacity in a deployment: yes or no, and why.
// Against a gateway, an engine's metrics and an admin endpoint (examples/admin) it
// starts some long streams and one more that has to wait, has one evicted, and sees what
// follows:
//
//	go run ./examples/evictcheck -gateway http://gateway:8080 -model MODEL \
//	  -metrics http://engine:8000/metrics -admin http://127.0.0.1:9003
//
// To see what it says of deployments in which all is well, or something is not:
//
//	go run ./examples/evictcheck -demo normal
//
// It evicts only its own requests. It puts load on the engine, for some seconds, and
// wants it to be idle otherwise. With -json it prints a [Report].
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	os.Exit(command(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// options are what the flags say.
type options struct {
	config
	timeout       time.Duration
	json, quiet   bool
	demo, through string // the demo's setup and gateway
}

const usage = `Tells whether eviction frees capacity here. It starts some long streams through the
gateway, and one more that has to wait; has the admin endpoint (examples/admin) evict
one of its own; and sees in the client and in the engine's metrics what follows.

  evictcheck -gateway URL -metrics URL -admin URL [-model NAME] [flags]
  evictcheck -demo NAME [flags]

Flags:
`

// exits ends the usage.
const exits = `
Demos, for -demo:
%s
The exit code is 0 for yes, 1 for no, 2 for could not tell and for bad flags. Progress
goes to stderr, the result to stdout; the fields of -json are those of type Report.
`

// parse reads the command line.
func parse(args []string, stderr io.Writer) (o options, err error) {
	f := flag.NewFlagSet("evictcheck", flag.ContinueOnError)
	f.SetOutput(stderr)
	f.Usage = func() {
		fmt.Fprint(stderr, usage)
		f.PrintDefaults()
		var list strings.Builder
		for _, s := range setups {
			fmt.Fprintf(&list, "  %-16s %s\n", s.name, s.about)
		}
		fmt.Fprintf(stderr, exits, list.String())
	}
	o.header, o.names = make(http.Header), defaultNames()
	f.StringVar(&o.gateway, "gateway", "", "`URL` of the gateway, without the path")
	f.StringVar(&o.path, "path", "/v1/completions", "`path` of completions, or of chat completions")
	f.StringVar(&o.model, "model", "", "`name` of the model")
	f.Func("header", "a header of the streams, `name:value`, such as 'authorization: Bearer KEY'; may be repeated", func(text string) error {
		k, v, ok := strings.Cut(text, ":")
		if !ok || k == "" {
			return errors.New("want name: value")
		}
		o.header.Add(strings.TrimSpace(k), strings.TrimSpace(v))
		return nil
	})
	f.BoolVar(&o.http2, "http2", false, "stream over HTTP/2 also where the URL is http://")
	f.StringVar(&o.metrics, "metrics", "", "`URL` of the engine's metrics")
	f.Var(o.names, "metric", "name of a metric, `key=name`; the keys are running, waiting, kv, finished (requests), generated (tokens), preemptions;\nmay be repeated. The names of vLLM, SGLang and llama.cpp are known")
	f.StringVar(&o.engine, "engine", "", "`URL` of the engine itself, without the path: tells a hop in between from the engine.\nThe host of -metrics unless given; none to leave it alone")
	f.StringVar(&o.admin, "admin", "http://127.0.0.1:9003", "`URL` of the admin endpoint")
	f.IntVar(&o.streams, "streams", 8, "`number` of streams to start, 1 to 1000: as many as the engine runs at once, or more")
	f.IntVar(&o.prompt, "prompt", 2000, "`bytes` of random text in each prompt")
	f.IntVar(&o.tokens, "max-tokens", 2000, "how many `tokens` a stream may have: it must not end while the check runs")
	f.DurationVar(&o.effect, "effect", 3*time.Second, "how long to wait for an effect")
	f.DurationVar(&o.every, "every", 50*time.Millisecond, "how often to look at the metrics")
	f.DurationVar(&o.timeout, "timeout", time.Minute, "how long it may take altogether")
	f.BoolVar(&o.json, "json", false, "print the result as JSON")
	f.BoolVar(&o.quiet, "q", false, "show no progress")
	f.StringVar(&o.demo, "demo", "", "check a deployment that is started for it: see below")
	f.StringVar(&o.through, "demo-gateway", "auto", "envoy (the binary that $ENVOY_BIN names, or envoy on $PATH), in-process (a fake of it),\nor auto: envoy if there is one, else in-process")
	if err := f.Parse(args); err != nil {
		return o, err
	}
	given := make(map[string]bool)
	f.Visit(func(f *flag.Flag) { given[f.Name] = true })
	err = o.check(f.Args(), given)
	if err != nil {
		fmt.Fprintln(stderr, err)
	}
	return o, err
}

// check completes the options, or says what is wrong with them.
func (o *options) check(rest []string, given map[string]bool) (err error) {
	switch {
	case len(rest) > 0:
		return fmt.Errorf("unexpected argument %q", rest[0])
	case o.streams < 1 || o.streams > 1000:
		return errors.New("-streams must be 1 to 1000")
	case o.prompt < 1 || o.prompt > 1<<20:
		return errors.New("-prompt must be 1 to 1048576")
	case o.tokens < 2*probed:
		return fmt.Errorf("-max-tokens must be %d at least", 2*probed)
	case o.effect <= 0 || o.every <= 0 || o.timeout <= 0:
		return errors.New("-effect, -every and -timeout must be positive")
	case !strings.HasPrefix(o.path, "/"):
		return errors.New("-path must begin with /")
	}
	if o.demo != "" {
		for _, name := range []string{"gateway", "metrics", "admin", "engine"} {
			if given[name] {
				return fmt.Errorf("-demo brings its own -%s", name)
			}
		}
		if o.setup().name == "" {
			return fmt.Errorf("-demo: there is no %q", o.demo)
		}
		if o.through != "auto" && o.through != "envoy" && o.through != "in-process" {
			return fmt.Errorf("-demo-gateway: there is no %q", o.through)
		}
		if !given["streams"] {
			o.streams = demoSlots
		}
		if !given["every"] {
			o.every = 10 * time.Millisecond
		}
		return nil
	}
	if o.gateway, err = base("gateway", o.gateway); err != nil {
		return err
	}
	if o.admin, err = base("admin", o.admin); err != nil {
		return err
	}
	u, err := parseURL("metrics", o.metrics)
	if err != nil {
		return err
	}
	switch o.engine {
	case "":
		o.engine = u.Scheme + "://" + u.Host
	case "none":
		o.engine = ""
	default:
		o.engine, err = base("engine", o.engine)
	}
	return err
}

func (o *options) setup() setup {
	for _, s := range setups {
		if s.name == o.demo {
			return s
		}
	}
	return setup{}
}

func parseURL(name, text string) (*url.URL, error) {
	if text == "" {
		return nil, fmt.Errorf("-%s is missing (-h shows all flags)", name)
	}
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return nil, fmt.Errorf("-%s: want a URL such as http://127.0.0.1:8080, got %q", name, text)
	}
	return u, nil
}

// base returns a URL to append a path to.
func base(name, text string) (string, error) {
	u, err := parseURL(name, text)
	if err != nil {
		return "", err
	}
	return strings.TrimSuffix(u.String(), "/"), nil
}

// command is the program. It returns the exit code, and leaves nothing behind.
func command(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	o, err := parse(args, stderr)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		return 2
	}
	start := time.Now()
	say := func(who, format string, a ...any) {
		if !o.quiet {
			fmt.Fprintf(stderr, "%6.2f s  %-8s %s\n", time.Since(start).Seconds(), who, fmt.Sprintf(format, a...))
		}
	}
	ctx, cancel := context.WithTimeoutCause(ctx, o.timeout, errTimeout)
	defer cancel()
	if o.demo != "" {
		d, err := startDemo(ctx, o.setup(), o.through)
		if err != nil {
			fmt.Fprintln(stderr, err)
			return 2
		}
		defer d.close()
		o.gateway, o.metrics, o.engine, o.admin = d.gateway, d.metrics, d.engine, d.admin
		say("demo", "%s: %s", o.demo, o.setup().about)
		say("gateway", "%s", d.name)
	}
	r := run(ctx, o.config, say)
	if o.json {
		err = r.writeJSON(stdout)
	} else {
		if !o.quiet {
			fmt.Fprintln(stderr)
		}
		err = r.writeText(stdout)
	}
	if err != nil {
		fmt.Fprintln(stderr, err)
		return 2
	}
	return r.exitCode()
}
