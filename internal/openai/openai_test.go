// Package openai_test shows what clients make of an eviction: OpenAI's own, for Python
// and Node, and a strict parser of server-sent events, against a real Envoy with a
// wrapped endpoint picker.
//
// Without Envoy and the clients these tests fail; they never skip. See envoy.Find and
// install.sh.
package openai_test

import (
	"bufio"
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// An ending is what a client gets behind the first words of an answer, or instead.
type ending string

const (
	whole      ending = "whole"       // the rest, and a normal end
	status     ending = "status"      // a 429
	errorEvent ending = "error event" // and then a reset
	lastEvent  ending = "last event"  // an error event and a normal end
	reset      ending = "reset"
)

// endings is the ending of each plan in each setting.
var endings = map[string]map[plan]ending{
	"FULL_DUPLEX_STREAMED": {waiting: status, midAnswer: errorEvent, midEvent: reset, untouched: whole},
	"CleanEnd":             {waiting: status, midAnswer: lastEvent, midEvent: reset, untouched: whole},
	"STREAMED":             {waiting: status, midAnswer: errorEvent, midEvent: reset, untouched: whole},
	"NONE":                 {waiting: status, midAnswer: reset, midEvent: reset, untouched: whole},
}

// An outcome is what one of OpenAI's clients makes of an answer.
type outcome struct {
	Text string // the pieces that it returned

	// What it raised: nothing if the answer ended normally.
	Raised   []string // the exception's classes, the closest first
	APIError bool     // it is an openai.APIError
	Cause    string   // the class of its cause
	Message  string
	Type     string
	Code     string
	Status   int
	Body     map[string]any // the error object
}

const message = "The request was evicted: preempted. Please retry."

var (
	body = map[string]any{"message": message, "type": "rate_limit_error", "param": nil, "code": "request_evicted"}

	begun = strings.Join(first, "")
	full  = begun + strings.Join(rest, "")
)

// An sdk is one of OpenAI's clients. It is installed in a directory of its name, in
// OPENAI_CLIENTS.
type sdk struct {
	name    string
	files   string // a pattern of what must be there
	command []string
	script  string // for command's standard input
	makes   map[ending]outcome
}

var (
	//go:embed client.py
	pythonScript string
	//go:embed client.mjs
	nodeScript string

	pythonEvicted = outcome{
		Text:   begun,
		Raised: []string{"APIError", "OpenAIError", "Exception"}, APIError: true,
		Message: message, Type: "rate_limit_error", Code: "request_evicted", Body: body,
	}
	nodeEvicted = outcome{
		Text:   begun,
		Raised: []string{"APIError", "OpenAIError", "Error"}, APIError: true,
		Message: message, Type: "rate_limit_error", Code: "request_evicted", Body: body,
	}
)

var sdks = []sdk{{
	"python", "lib/*/site-packages/openai", []string{"bin/python", "-I", "-"}, pythonScript, map[ending]outcome{
		whole: {Text: full},
		status: {
			Raised: []string{"RateLimitError", "APIStatusError", "APIError", "OpenAIError", "Exception"}, APIError: true,
			Message: "Error code: 429 - " + message, Type: "rate_limit_error", Code: "request_evicted", Status: 429, Body: body,
		},
		errorEvent: pythonEvicted,
		lastEvent:  pythonEvicted,
		reset: {
			Text:   begun,
			Raised: []string{"APIConnectionError", "APIError", "OpenAIError", "Exception"}, APIError: true,
			Cause: "RemoteProtocolError", Message: "Connection error.",
		},
	},
}, {
	// Node looks for packages from where a script lies; one from stdin lies where Node runs.
	"node", "node_modules/openai", []string{"node", "--input-type=module", "-"}, nodeScript, map[ending]outcome{
		whole: {Text: full},
		status: {
			Raised: []string{"RateLimitError", "APIError", "OpenAIError", "Error"}, APIError: true,
			Message: "429 " + message, Type: "rate_limit_error", Code: "request_evicted", Status: 429, Body: body,
		},
		errorEvent: nodeEvicted,
		lastEvent:  nodeEvicted,
		reset: { // no error of its own: fetch's
			Text:   begun,
			Raised: []string{"TypeError", "Error"},
			Cause:  "SocketError", Message: "terminated",
		},
	},
}}

// TestClients runs all clients at once.
func TestClients(t *testing.T) {
	var gs []*gateway
	for _, s := range settings {
		gs = append(gs, start(t, s))
	}
	for _, c := range sdks {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			c.run(t, gs)
		})
	}
	for _, h2 := range []bool{false, true} {
		p := newParser(t, h2)
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			p.run(t, gs)
		})
		for _, g := range gs {
			t.Run(p.name+"/random/"+g.name, func(t *testing.T) {
				t.Parallel()
				p.random(t, g)
			})
		}
	}
}

// run has the client ask for an answer in each setting with each plan. One process does
// it all: to start takes it longer than the rest.
func (c sdk) run(t *testing.T, gs []*gateway) {
	type call struct {
		g *gateway
		plan
	}
	var calls []call
	var urls []string
	for _, g := range gs {
		for _, p := range plans {
			calls, urls = append(calls, call{g, p}), append(urls, g.base(c.name, p))
		}
	}
	var stderr bytes.Buffer
	cmd := c.cmd(t, urls)
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatalf("%v; %s", err, advice)
	}
	pieces := 0
	for lines := bufio.NewScanner(out); lines.Scan(); {
		var l struct {
			Client  string
			Piece   *string
			Outcome *outcome
		}
		if err := json.Unmarshal(lines.Bytes(), &l); err != nil {
			t.Errorf("%v: %s", err, lines.Bytes())
		}
		switch {
		case l.Client != "":
			t.Log(l.Client)
		case l.Piece != nil:
			pieces++
			if now := calls[0]; pieces == len(first) && now.plan != untouched && !now.g.evict(c.name, now.plan) {
				t.Errorf("%s, %s: not evicted", now.g.name, now.plan)
			}
		case l.Outcome != nil:
			now := calls[0]
			pieces, calls = 0, calls[1:]
			e := endings[now.g.name][now.plan]
			if d := cmp.Diff(c.makes[e], *l.Outcome); d != "" {
				t.Errorf("%s, %s: not what the client makes of ending %q (-want +got):\n%s", now.g.name, now.plan, e, d)
			}
		}
	}
	if err := cmd.Wait(); err != nil || len(calls) > 0 {
		t.Errorf("%v, without %d outcomes: %s", err, len(calls), stderr.Bytes())
	}
}

const advice = `"make openai-clients" installs OpenAI's clients and prints what OPENAI_CLIENTS is to be`

// cmd returns the command that runs the client.
func (c sdk) cmd(t *testing.T, args []string) *exec.Cmd {
	t.Helper()
	clients := os.Getenv("OPENAI_CLIENTS")
	if clients == "" {
		t.Fatal("OPENAI_CLIENTS is not set; " + advice)
	}
	dir, err := filepath.Abs(filepath.Join(clients, c.name))
	if err != nil {
		t.Fatal(err)
	}
	if m, _ := filepath.Glob(filepath.Join(dir, c.files)); len(m) == 0 {
		t.Fatalf("no %s in %s; %s", c.files, dir, advice)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	t.Cleanup(cancel)
	name := c.command[0]
	if strings.Contains(name, "/") {
		name = filepath.Join(dir, name)
	}
	cmd := exec.CommandContext(ctx, name, append(c.command[1:len(c.command):len(c.command)], args...)...)
	cmd.Dir, cmd.Stdin = dir, strings.NewReader(c.script)
	cmd.Env = append(os.Environ(), "NO_PROXY=127.0.0.1", "no_proxy=127.0.0.1")
	return cmd
}
